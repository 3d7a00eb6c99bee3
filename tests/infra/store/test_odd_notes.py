"""JSON files that were emptied, cut, or hold something else: a note is set aside with a warning, a record is named in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared import commit

from infra.config import DataConfig, EngineConfig, RunConfig
from infra.engines.server import server_process
from infra.megatron.protocol.mailbox import Mailbox
from infra.models import base_model
from infra.processes import gpu_lock, gpu_programs
from infra.runs import evaluations, lineage, replay
from infra.services import servers
from infra.store import files
from infra.store.layout import run_folder
from infra.telemetry import memory_usage
from infra.tracking import mlflow_store, upload
from infra.trainers import resident
from tasks.support.preflight import open_run

ODD = [b"", b'{"process": {"pi', b"{}", b"[]", b"7", b'"text"', b"null", b'{"process": 3, "url": []}']


def noted_programs() -> Any:
    return gpu_programs._noted()


def holder() -> Any:
    return gpu_lock.holder()


def deliveries_stopped() -> Any:
    return upload.stop()


NOTES: dict[str, Callable[[], Any]] = {
    "engine.json": server_process.recorded,
    "engine-launches.json": server_process.num_launches,
    "trainer.json": resident.recorded,
    "services/prefect.json": lambda: servers.living("prefect"),
    "services/mlflow.json": servers.running_mlflow_url,
    "services/worker.json": lambda: servers.living("worker"),
    "services/deliveries/1.json": deliveries_stopped,
    "services/upload-request.json": lambda: upload._request(""),
    "locks/programs/0123abcd": noted_programs,
    "locks/holder.json": holder,
    "runs/r/mlflow.json": lambda: mlflow_store.known_run("r"),
    "runs/r/steps/000000/memory/training.json": lambda: memory_usage.of_step("r", 0),
    "box/state.json": lambda: Mailbox(files.settings().workspace / "box").state(),
}
"""Notes that can be made again, and what reads them: the answer is that of a note that was never written."""
VALID = {
    ("engine-launches.json", b"7"): 7,
    ("services/upload-request.json", b'"text"'): "text",
    ("runs/r/steps/000000/memory/training.json", b"[]"): {"training": []},
}
"""Of the odd contents, those which are what the note should be."""


@pytest.mark.parametrize("content", ODD)
@pytest.mark.parametrize("name", NOTES)
def test_an_odd_note_counts_as_not_written(
    workspace: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    without = NOTES[name]()
    path = workspace / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(content)
    assert NOTES[name]() == VALID.get((name, content), without)
    if (name, content) not in VALID and name != "locks/holder.json":
        assert str(path) in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("content", ODD)
def test_an_odd_note_is_set_aside(workspace: Path, content: bytes) -> None:
    path = workspace / "engine.json"
    path.write_bytes(content)
    assert server_process.recorded() is None
    assert not path.exists() and path.with_name("engine.json.odd").read_bytes() == content


def test_a_model_s_digest_does_not_hang_on_its_note(workspace: Path, model_folder: Path, tmp_path: Path) -> None:
    large = tmp_path / "model"
    large.mkdir()
    (large / "model.safetensors").write_bytes(bytes(2**20 + 1))
    expected = base_model.digest(large)
    (note,) = (workspace / "models/digests").glob("*.json")
    for content in ODD:
        note.write_bytes(content)
        assert base_model.digest(large) == expected


@pytest.fixture
def config(workspace: Path, model_folder: Path) -> RunConfig:
    return RunConfig(name="r", model=str(model_folder), engine=EngineConfig(kind="scripted"), data=DataConfig(num_prompts=2))


def open_again(config: RunConfig) -> None:
    open_run(config)


RECORDS: dict[str, Callable[[RunConfig], Any]] = {
    "workspace.json": lambda config: files.open_workspace(),
    "runs/r/config.json": open_again,
    "runs/r/id.json": lambda config: files.run_id("r"),
    "runs/r/origin.json": lambda config: replay.origin_of("r"),
    "runs/r/evaluations/000001-a-b/evaluation.json": lambda config: evaluations.of_run("r"),
    "runs/r/steps/000000/manifest.json": lambda config: lineage.adapter_after("r", 0),
    "runs/r/mlflow_address.json": open_again,
}
"""Records that cannot be made again, and what reads them."""


@pytest.mark.parametrize("content", ODD)
@pytest.mark.parametrize("name", RECORDS)
def test_an_odd_record_is_named_in_one_line(config: RunConfig, workspace: Path, name: str, content: bytes) -> None:
    path = workspace / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if name == "runs/r/id.json" and content == b'"text"':
        assert RECORDS[name](config) == "text"
        return
    try:
        RECORDS[name](config)
    except ValueError as error:
        assert ("\n" not in str(error) and str(path) in str(error)) or str(workspace) in str(error)
    else:
        assert name.endswith(("config.json", "mlflow_address.json")), "it was read as if nothing were wrong"


def test_a_step_whose_notes_are_odd_is_delivered_all_the_same(config: RunConfig, workspace: Path) -> None:
    """mlflow.json is looked up again in the store."""
    commit(config, 0, {"reward/mean": 0.5})
    files.new_id(run_folder("r"))
    first = mlflow_store.deliver("r")
    for content in ODD:
        (run_folder("r") / "mlflow.json").write_bytes(content)
        assert mlflow_store.deliver("r") == first
    assert json.loads((run_folder("r") / "mlflow.json").read_bytes())["run_id"] == first
