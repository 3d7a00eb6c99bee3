"""Delivery to a real MLflow server that is killed, loses answers, answers late, or never: all of it arrives, in order, once."""

import hashlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shared
from shared import FIRST_PORT, load_module

from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.mirror import copying
from infra.processes import children as processes
from infra.records import File, StepReport
from infra.runs import evaluations, lineage
from infra.services import servers
from infra.settings import CHECKOUT, settings
from infra.store.files import new_id, read_json, write, write_json, write_note
from infra.store.layout import Workspace, adapter_folder, run_folder
from infra.tracking import mlflow_store, upload

lossy = load_module(Path(__file__).with_name("lossy_proxy.py"))

pytestmark = pytest.mark.timeout(600)

PORT = FIRST_PORT + 70
METRICS = ("reward/mean", "train/loss", "time/step_s")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with an MLflow server of its own."""
    with pytest.MonkeyPatch.context() as patch:
        workspace = tmp_path_factory.mktemp("store")
        patch.setenv("RATCHET_WORKSPACE", str(workspace))
        patch.setenv("RATCHET_MLFLOW_PORT", str(PORT))
        settings.cache_clear()
        servers.ensure_mlflow()
        try:
            yield workspace
        finally:
            servers.stop_all()
            settings.cache_clear()


@pytest.fixture
def run(request: pytest.FixtureRequest, store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a run that has begun."""
    monkeypatch.setenv("RATCHET_WORKSPACE", str(store))
    settings.cache_clear()
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    name = f"r{name}"
    new_id(run_folder(name))
    write_json(run_folder(name) / "config.json", config_of(name).model_dump(mode="json"))
    return name


def config_of(run: str, register_every: int = 1) -> RunConfig:
    return RunConfig(name=run).but(tracking={"experiment": run, "register_every": register_every})


def commit(run: str, step: int, register_every: int = 1) -> None:
    weights = f"adapter {step + 1} of {run}".encode() * 1000
    shared.commit(config_of(run, register_every), step, dict.fromkeys(METRICS, step + 0.5), weights=weights)


def evaluate(run: str, version: int) -> None:
    """What an evaluation leaves behind that is better than none."""
    config = config_of(run).eval_config
    adapter = StepReport.model_validate(read_json(run_folder(run) / f"steps/{version - 1:06d}/report.json")).adapter
    record = Evaluation(
        run=run,
        step=version,
        adapter_sha256=adapter.sha256,
        eval_digest=evaluations.eval_digest(config),
        file=File(path="x", sha256="x", num_bytes=1),
        num_prompts=4,
        num_overlapping=0,
        pass_at_1=0.5,
        pass_at_k={},
        truncated_frac=0.0,
    )
    folder = evaluations.folder_of(adapter, config)
    evaluations.write(folder, record, eval_config=config.model_dump(mode="json"), at=500.0, seconds=3.0)


def end(run: str) -> None:
    """What the end of a run leaves behind."""
    write(run_folder(run) / "summary/report.md", b"ended")


def rows(store: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{store}/mlflow/mlflow.db?mode=ro", uri=True)
    try:
        return connection.execute(query, values).fetchall()
    finally:
        connection.close()


def assert_all_is_there_once(store: Path, run: str, num_steps: int, registered: tuple[int, ...] | None = None) -> None:
    """By the tables of the store itself.

    registered: Adapters that are versions, in the order of registration; None: all of them.
    """
    runs = rows(
        store,
        "select r.run_uuid, r.lifecycle_stage, e.experiment_id from runs r join experiments e using (experiment_id) where e.name = ?",
        run,
    )
    [(run_uuid, _, experiment)] = [row for row in runs if row[1] == "active"]
    for name in METRICS:
        found = rows(
            store, "select step, value, timestamp from metrics where run_uuid = ? and key = ? order by rowid", run_uuid, name
        )
        assert found == [(step, step + 0.5, 1000_000 + 1000 * step) for step in range(num_steps)]
    twins = [row[0] for row in runs if row[1] != "active"]
    assert not [row for twin in twins for row in rows(store, "select * from metrics where run_uuid = ?", twin)]
    parameters = dict(rows(store, "select key, value from params where run_uuid = ?", run_uuid))
    assert parameters.keys() == mlflow_store.flattened(config_of(run).model_dump(mode="json")).keys() - set(
        mlflow_store.NO_PARAMETERS
    )
    num_inputs = 1 + any((run_folder(run) / "evaluations").glob("*"))
    assert len(rows(store, "select * from inputs where destination_id = ?", run_uuid)) == num_inputs
    assert len(rows(store, "select * from datasets where experiment_id = ?", str(experiment))) == num_inputs
    versions = rows(
        store,
        "select t.value from model_versions v join model_version_tags t using (name, version) "
        "where name = ? and key = 'ratchet.adapter' and current_stage != 'Deleted_Internal' order by version",
        run,
    )
    assert versions == [(str(version),) for version in registered or range(1, num_steps + 1)]
    [artifacts] = (store / "mlflow" / "artifacts" / run).glob(f"{run_uuid}/artifacts")
    adapters = {path.parent.name: path.read_bytes() for path in (artifacts / "adapters").rglob("*.safetensors")}
    assert adapters == {f"{step + 1:06d}": f"adapter {step + 1} of {run}".encode() * 1000 for step in range(num_steps)}
    assert mlflow_store.waiting(run) == []
    assert mlflow_store.known_run(run) == run_uuid


def aliases(store: Path, run: str) -> dict[str, str]:
    """Alias -> adapter."""
    return dict(
        rows(
            store,
            "select a.alias, t.value from registered_model_aliases a join model_version_tags t using (name, version) "
            "where name = ? and t.key = 'ratchet.adapter'",
            run,
        )
    )


def deliver_by_command(timeout_s: float = 120, **environment: str) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen([sys.executable, "-m", "infra.tracking.upload"], cwd=CHECKOUT, env={**os.environ, **environment})
    if timeout_s:
        assert child.wait(timeout_s) == 0
    return child


def kill_server() -> None:
    service = servers.living(servers.MLFLOW)
    root = processes.find(service.process) if service else None
    assert root is not None
    for process in [*root.children(recursive=True), root]:
        process.kill()
    root.wait(20)


def test_every_answer_is_lost_once_and_nothing_is_there_twice(store: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server carries out a request, and its answer does not reach the client: tried for each request of a delivery.

    The delivery registers an adapter after a step, the best one after an evaluation, and the last one at the end.
    """
    for step in range(3):
        commit(run, step, register_every=2)
    evaluate(run, 1)
    end(run)
    with lossy.lossy_proxy(servers.ensure_mlflow()) as proxy:
        # a server elsewhere would choose the artifacts' place itself
        monkeypatch.setattr(mlflow_store, "uri", lambda run=None: proxy.url)
        for lost in range(1, 200):
            proxy.num_requests, proxy.lost = 0, {lost}
            for path in run_folder(run).rglob("delivered.json"):
                path.unlink()  # so that each request of the whole delivery has its turn
            mlflow_store.deliver(run)
            if proxy.num_requests < lost:
                break
        assert 15 < lost < 199, "a delivery has another number of requests than that"
    assert_all_is_there_once(store, run, 3, registered=(2, 1, 3))
    assert aliases(store, run) == {"adapter-1": "1", "adapter-2": "2", "adapter-3": "3", "best": "1", "last": "3"}


def test_what_was_given_up_and_then_happened_is_taken_out_again(store: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lossy.lossy_proxy(servers.ensure_mlflow()) as proxy:
        monkeypatch.setattr(mlflow_store, "uri", lambda run=None: proxy.url)
        for step, path in enumerate(("/runs/create", "/model-versions/create")):
            commit(run, step)
            arrives = threading.Event()
            proxy.held = {path: arrives}
            monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
            while proxy.held:  # on a busy machine a request before it may be given up, too
                assert mlflow_store.deliver(run) is None
            monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
            assert mlflow_store.deliver(run) is not None, "that should have been before the late one"
            arrives.set()
            for late in proxy.pending:
                late.join()
        commit(run, 2)
        assert mlflow_store.deliver(run) is not None
    assert_all_is_there_once(store, run, 3)


@pytest.mark.full  # its sample is the one whose answers are lost
def test_a_delivery_and_its_server_are_killed_in_the_middle_again_and_again(store: Path, run: str) -> None:
    other = f"{run}-other"
    new_id(run_folder(other))
    write_json(run_folder(other) / "config.json", config_of(other).model_dump(mode="json"))
    for step in range(25):
        commit(run, step, register_every=5)
        commit(other, step, register_every=10)
    evaluate(run, 7)
    end(run)
    for kill in range(3):
        before = len(mlflow_store.waiting(run)) + len(mlflow_store.waiting(other))
        child = deliver_by_command(timeout_s=0)
        deadline = time.monotonic() + 60
        while len(mlflow_store.waiting(run)) + len(mlflow_store.waiting(other)) > before - 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        if kill == 1:
            kill_server()
        child.kill()
        child.wait()
        assert 0 < len(mlflow_store.waiting(run)) + len(mlflow_store.waiting(other)) < before, "it was not killed in the middle"
        servers.ensure_mlflow()
    deliver_by_command(timeout_s=300)
    assert_all_is_there_once(store, run, 25, registered=(5, 10, 15, 20, 25, 7))
    assert (aliases(store, run)["best"], aliases(store, run)["last"]) == ("7", "25")
    assert_all_is_there_once(store, other, 25, registered=(10, 20))


def test_a_store_that_never_answers_holds_no_step_and_gets_all_when_it_does(
    store: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen(50)
        with monkeypatch.context() as patch:
            patch.setenv("RATCHET_MLFLOW_URI", f"http://127.0.0.1:{hung.getsockname()[1]}")
            settings.cache_clear()
            patch.setattr(upload, "FIRST_WAIT_S", 1.0)
            for step in range(3):
                commit(run, step)
                began = time.monotonic()
                assert upload.start_upload(run) is None
                assert time.monotonic() - began < 15
            assert len(mlflow_store.waiting(run)) == 3
            until(
                lambda: len(living_uploads()) == 1
            )  # one talks to the store for all; what a step started before it had begun leaves
        assert upload.stop()
        assert not living_uploads()
        assert not upload.stop(), "nothing is left to stop"
    settings.cache_clear()
    deliver_by_command()
    assert_all_is_there_once(store, run, 3)


def living_uploads() -> list[int]:
    """Pids of the uploads that steps of this workspace started."""
    found = [process for ref in notes() for process in processes.members(ref.program)]
    return [process.pid for process in found if "infra.tracking.upload" in process.cmdline()]


def notes() -> list[processes.ProcessRef]:
    folder = Workspace.here().deliveries
    return [processes.ProcessRef.model_validate(read_json(path)) for path in folder.glob("*.json")]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_process_uploads_all_steps_of_its_owner_and_ends_with_it(store: Path, run: str) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    child = serving(owner)
    for step in range(3):
        commit(run, step)
        assert upload.start() == child, "another process was started while one stays"
        until(lambda: mlflow_store.waiting(run) == [])
    assert processes.find(child)
    owner.kill()
    owner.wait()
    until(lambda: processes.find(child) is None)
    assert_all_is_there_once(store, run, 3)


def serving(owner: "subprocess.Popen[bytes]") -> processes.ProcessRef:
    """A process that uploads for an owner and is ready for requests."""
    upload.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: owner.pid)
        child = upload.start()
    until(lambda: is_taken(upload._serving()))
    return child


def is_taken(lock: str) -> bool:
    with upload._locked(lock, wait=False) as is_free:
        return not is_free


def test_a_process_that_stays_with_another_store_takes_no_request_away(
    store: Path, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is begun without RATCHET_STORE_URL, or with a wrong one, and is given again with a right one."""
    owner = subprocess.Popen(["sleep", "600"])
    child = serving(owner)
    commit(run, 0)
    monkeypatch.setenv("RATCHET_STORE_URL", str(tmp_path))
    settings.cache_clear()
    assert copying.waiting(run)
    assert upload.start() != child
    until(lambda: copying.waiting(run) == [])
    assert upload.stop()
    owner.kill()
    owner.wait()
    monkeypatch.delenv("RATCHET_STORE_URL")
    settings.cache_clear()


def test_an_upload_that_was_killed_between_steps_is_started_again(store: Path, run: str) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    child = serving(owner)
    commit(run, 0)
    upload.start()
    until(lambda: mlflow_store.waiting(run) == [])
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: processes.find(child) is None)
    commit(run, 1)
    assert upload.start() != child
    until(lambda: mlflow_store.waiting(run) == [])
    assert upload.stop()
    owner.kill()
    owner.wait()
    assert_all_is_there_once(store, run, 2)


def test_a_request_that_comes_while_the_process_ends_is_met(store: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the owner dead, a step is committed and finds a living process, then it frees its lock."""
    upload.stop()
    commit(run, 0)
    write_note(Workspace.here().upload_request, "first")
    wait, ends = upload._next_request, []

    def ending(done: str, owner: processes.ProcessRef) -> str:
        request = wait(done, owner)
        if request == done and not ends:
            ends.append(done)
            commit(run, 1)
            write_note(Workspace.here().upload_request, "second")
        return request

    monkeypatch.setattr(upload, "_next_request", ending)
    upload.serve(processes.ProcessRef(pid=2**22 + 1, started_ticks=1, boot="of no process"))
    assert ends == ["first"]
    assert_all_is_there_once(store, run, 2)


def test_a_process_without_requests_ends_though_its_owner_lives(store: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upload.stop()
    monkeypatch.setattr(upload, "IDLE_S", 0.0)
    commit(run, 0)
    write_note(Workspace.here().upload_request, "one")
    upload.serve(processes.ref_of(os.getpid()))
    assert_all_is_there_once(store, run, 1)


def test_deliveries_side_by_side_deliver_once(store: Path, run: str) -> None:
    for step in range(10):
        commit(run, step)
    children = [deliver_by_command(timeout_s=0) for _ in range(3)]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    assert_all_is_there_once(store, run, 10)


def test_a_run_that_cannot_be_read_keeps_no_other_from_the_store(store: Path, run: str) -> None:
    other = f"a-{run}"  # its turn comes first
    new_id(run_folder(other))
    commit(other, 0)
    write_json(run_folder(other) / "config.json", {"of": "another version"})
    commit(run, 0)
    done = subprocess.run(
        [sys.executable, "-m", "infra.tracking.upload"], cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and f"error: not delivered: {other}; the reasons stand above" in done.stderr
    assert_all_is_there_once(store, run, 1)
    assert upload.waiting_runs() == [other]
    shutil.rmtree(run_folder(other))


def test_a_delivery_has_the_time_that_large_adapters_take(store: Path, run: str) -> None:
    before = upload.lifetime_s()
    commit(run, 0)
    folder = adapter_folder(run, 1)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "adapter_more.safetensors").open("wb") as large:
        large.truncate(5_000_000_000)  # a hole
    assert before < 400 and 5000 <= upload.lifetime_s() - before < 5010
    (folder / "adapter_more.safetensors").unlink()


def test_the_first_hand_over_of_a_run_learns_its_mlflow_run(store: Path, run: str) -> None:
    commit(run, 0)
    found = upload.start_upload(run)
    assert found is not None
    assert (mlflow_store.run_url(found, run) or "").startswith(servers.ensure_mlflow())
    deliver_by_command()
    assert read_json(run_folder(run) / "steps/000000/delivered.json")["run_id"] == found


@pytest.mark.parametrize("what", ["step", "run"])
def test_an_upload_marks_nothing_as_delivered_in_the_place_of_what_is_removed_meanwhile(workspace: Path, what: str) -> None:
    """What is made there later would never be delivered, and its adapters would count as safe to remove."""
    for step in range(2):
        shared.commit(RunConfig(name="r"), step, {"reward/mean": 0.5})
    delivered, is_under_way = run_folder("r") / "steps/000001/delivered.json", threading.Event()

    def deliver() -> None:
        with upload._locked("delivery", wait=True):
            is_under_way.set()
            time.sleep(0.5)
            write_json(delivered, {"run_id": "1", "uri": "", "content": ""})

    uploads = threading.Thread(target=deliver)
    uploads.start()
    assert is_under_way.wait(10)
    if what == "step":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lineage, "_check_can_go_on", lambda run, step: None)  # its manifests are short
            upload.drop("r", 1)
    else:
        upload.remove("r")
    uploads.join()
    assert not delivered.parent.exists() and (what == "step") == run_folder("r").exists()
