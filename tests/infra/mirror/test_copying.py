"""Copies of a run in a real S3 server (moto) and in a folder: whole, once, in order, and continued on another machine."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from shared import commit, load_module

from infra.config import RunConfig
from infra.failures import StoreRefused
from infra.mirror import copying, ownership, remote
from infra.mirror.copying import AnotherRun, copy_run, waiting
from infra.mirror.fetching import fetch, stored_runs
from infra.mirror.remote import Remote, RemoteError
from infra.runs import lineage
from infra.settings import settings
from infra.store.files import new_id, read_json, write_json
from infra.store.layout import RunFolder, adapter_folder, run_folder, step_folder_of
from infra.tracking import mlflow_store, upload

servers = load_module(Path(__file__).with_name("object_store.py"))

RUN = "mine"
URL = "s3://runs/team"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with servers.object_store() as proxy:
        yield proxy


@pytest.fixture
def store(s3: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The proxy before an empty bucket, with a run of two steps here."""
    for name, value in (("AWS_ENDPOINT_URL", s3.url), ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # the library's own, with pauses of seconds
    monkeypatch.setattr(copying, "_away", {})
    here(workspace, monkeypatch)
    s3.strike("", 0)
    s3fs.S3FileSystem.clear_instance_cache()
    files = Remote(URL).files  # whose first call loads the library's data: seconds on a busy machine
    if files.exists("runs/team"):
        files.rm("runs/team", recursive=True)
    begin()
    s3.seen.clear()
    yield s3


def here(workspace: Path, monkeypatch: pytest.MonkeyPatch, url: str | None = URL) -> None:
    """Be the machine with this workspace."""
    monkeypatch.setenv("RATCHET_WORKSPACE", str(workspace))
    monkeypatch.setenv("RATCHET_STORE_URL", url) if url else monkeypatch.delenv("RATCHET_STORE_URL", raising=False)
    settings.cache_clear()


def begin(num_steps: int = 2) -> None:
    new_id(run_folder(RUN))
    write_json(RunFolder.of(RUN).config, RunConfig(name=RUN).model_dump(mode="json"))
    for step in range(num_steps):
        make(step)


def make(step: int, content: str = "adapter") -> None:
    weights = f"{content} {step + 1}".encode() * 1000
    commit(RunConfig(name=RUN), step, {"reward/mean": step + 0.5}, weights=weights, adapter_out=content)


def contents(folder: Path) -> dict[str, bytes]:
    """All that a machine that continues the run needs."""
    left_out = {"copied.json", "prefect.json", "delivered.json"}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in left_out
    }


def continued_elsewhere(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine has fetched the run and made its third step; this one is the first again."""
    first = settings().workspace
    assert copy_run(RUN)
    here(other, monkeypatch)
    fetch(f"{URL}/{RUN}")
    make(2)
    assert copy_run(RUN)
    here(first, monkeypatch)


def unfinished() -> list[str]:
    """Keys of uploads in parts that were not completed."""
    return [each["Key"] for each in Remote(URL).files.call_s3("list_multipart_uploads", Bucket="runs").get("Uploads", [])]


def test_a_run_is_continued_on_another_machine_with_equal_bytes(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [part.name for part in waiting(RUN)] == ["run", "adapter-000001", "step-000000", "adapter-000002", "step-000001"]
    assert copy_run(RUN) and waiting(RUN) == []
    before = contents(run_folder(RUN))
    [stored] = stored_runs(URL)
    assert stored == (RUN, 2, 1.5, f"{URL}/{RUN}", "")

    here(tmp_path / "other", monkeypatch)
    assert fetch(f"{URL}/{RUN}") == RUN
    assert contents(run_folder(RUN)) == before and lineage.committed_steps(RUN) == [0, 1]
    make(2)
    assert [part.name for part in waiting(RUN)][-2:] == ["adapter-000003", "step-000002"]
    assert copy_run(RUN) and stored_runs(URL)[0].num_steps == 3
    assert fetch(f"{URL}/{RUN}") == RUN, "a run that is here is left as it is"


def test_what_is_there_is_not_sent_again(store: Any) -> None:
    assert copy_run(RUN)
    first = sum(line.startswith("PUT") for line in store.seen)
    store.seen.clear()
    assert copy_run(RUN) and store.seen == [], "nothing is asked about what is known to be there"
    RunFolder.of(RUN).copied.unlink()
    assert copy_run(RUN)
    again = [line for line in store.seen if line.startswith("PUT")]
    assert first > 5 and again == [], "a lost note costs questions, no upload"


@pytest.mark.parametrize("fault", ["503", "reset", "lost"])
def test_a_store_that_fails_for_a_while_gets_everything_once(
    store: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.strike(fault, times=2)
    while not copy_run(RUN):
        pass
    before = contents(run_folder(RUN))
    here(tmp_path / "other", monkeypatch)
    fetch(f"{URL}/{RUN}")
    assert contents(run_folder(RUN)) == before


def test_a_store_that_is_away_is_one_line_and_nothing_is_lost(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store.strike("503", times=10_000, methods=("PUT", "POST", "GET", "HEAD"))
    assert copy_run(RUN) is False
    [record] = [each for each in caplog.records if each.levelname == "WARNING" and each.name.startswith("infra")]
    assert "\n" not in record.getMessage() and URL in record.getMessage() and len(waiting(RUN)) == 5
    copying.check()  # a run may begin
    store.strike("", 0)
    assert copy_run(RUN) and waiting(RUN) == []


EVERY = ("PUT", "POST", "GET", "HEAD", "DELETE")


def test_a_store_that_hangs_holds_no_step_and_gets_everything_once_when_it_answers(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert remote.CHECK_S <= 5
    for name in ("CHECK_S", "ANSWER_S"):
        monkeypatch.setattr(remote, name, 0.6)
    store.strike("hang", times=10_000, methods=EVERY)
    begin = time.monotonic()
    copying.check()
    assert copy_run(RUN) is False
    assert time.monotonic() - begin < 50, "by the library's own limits it would be a minute or more"
    checked, copied = [
        each.getMessage() for each in caplog.records if each.levelname == "WARNING" and each.name.startswith("infra")
    ]
    assert re.fullmatch(
        rf"RATCHET_STORE_URL: {URL} does not answer in time: it did not take \.ratchet within \d+ s; runs go on, their copies wait on "
        r"disk, and `ratchet upload` makes them",
        checked,
    )
    assert copied.startswith(f"run {RUN} is not copied: {URL} does not answer in time: it did not ") and "\n" not in copied
    assert len(waiting(RUN)) == 5
    monkeypatch.setattr(remote, "ANSWER_S", 30.0)
    store.strike("", 0)
    assert copy_run(RUN) and waiting(RUN) == []
    before = contents(run_folder(RUN))
    here(tmp_path / "other", monkeypatch)
    fetch(f"{URL}/{RUN}")
    assert contents(run_folder(RUN)) == before


def test_a_store_that_stays_away_is_checked_again_after_a_while_and_told_once(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_asked: list[int] = []

    def asked() -> None:
        num_asked.append(1)
        raise RemoteError("s3://runs/team cannot take .ratchet")

    remotes = Remote.check
    monkeypatch.setattr(Remote, "check", lambda self: asked())
    copying.check()
    copying.check()
    assert len(num_asked) == 1, "the next step does not wait for it"
    monkeypatch.setattr(copying, "RECHECK_S", 0.0)
    copying.check()
    assert len(num_asked) == 2 and caplog.text.count("cannot take .ratchet") == 1
    monkeypatch.setattr(Remote, "check", remotes)
    copying.check()
    monkeypatch.setattr(Remote, "check", lambda self: asked())
    copying.check()
    assert caplog.text.count("cannot take .ratchet") == 2, "it went away again"


def test_a_store_that_hangs_is_one_error_for_a_run_that_is_fetched(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.6)
    store.strike("hang", times=10_000, methods=EVERY)
    with pytest.raises(RemoteError, match="s3://runs/team does not answer in time: it did not list mine/index within"):
        fetch(f"{URL}/{RUN}")


def test_what_the_library_loads_is_not_in_the_limit_of_a_check(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, limits = Remote(URL), list[float]()
    monkeypatch.setattr(there.files, "connect", lambda timeout: limits.append(timeout))
    monkeypatch.setattr(there.files, "pipe_file", lambda path, data, timeout: limits.append(timeout))
    there.check()
    assert limits == [remote.ANSWER_S, remote.CHECK_S]


def test_a_large_file_has_the_time_of_a_slow_connection(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 2.0)
    given: list[float] = []
    there = Remote(URL)
    monkeypatch.setattr(there.files, "get_file", lambda path, local, timeout: given.append(timeout))
    there.get("mine/objects/x", settings().workspace / "x", 3_000_000)
    assert given == [5.0]


@pytest.mark.parametrize(
    ("fault", "method", "where"),
    [
        ("503", "PUT", "partNumber=2"),
        ("reset", "PUT", "partNumber=2"),
        ("lost", "POST", "uploadId="),
        ("reset", "POST", "uploadId="),
    ],
)
def test_a_file_that_is_sent_in_parts_is_there_whole_and_leaves_no_parts(
    store: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch, fault: str, method: str, where: str
) -> None:
    monkeypatch.setattr(s3fs.core, "calculate_chunksize", lambda size, chunksize=None: 5 << 20)  # the least that S3 takes
    local, there = workspace / "optimizer", Remote(URL)
    local.write_bytes(bytes(range(256)) * (11 << 12))
    store.strike(fault, times=3, methods=(method,), where=where)  # more often than the library tries
    there.put(local, "mine/objects/x")
    assert store.times == 0 and there.read("mine/objects/x") == local.read_bytes() and unfinished() == []


def test_refused_keys_stop_a_run_before_it_begins(store: Any) -> None:
    store.strike("403", times=10_000, methods=("PUT", "GET", "HEAD"))
    with pytest.raises(StoreRefused, match=r"RATCHET_STORE_URL: s3://runs/team does not take \.ratchet with these keys"):
        copying.check()


def test_a_bucket_that_does_not_exist_is_named(store: Any, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(workspace, monkeypatch, "s3://other/team")
    with pytest.raises(ValueError, match=r"RATCHET_STORE_URL: s3://other/team does not exist"):
        copying.check()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://me:secret@runs/x", "the store's address holds a password"),
        ("nosuch://runs", "store nosuch://runs cannot be used"),
        ("gs://runs", "store gs://runs needs the package gcsfs, which is not installed: .* -m pip install gcsfs"),
        ("az://runs", "store az://runs needs the package adlfs, which is not installed: .* -m pip install adlfs"),
        ("abfs://runs", "store abfs://runs needs the package adlfs"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        Remote(url)
    assert "secret" not in str(raised.value)


def test_a_changed_object_is_found_and_nothing_is_left_behind(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copy_run(RUN)
    files = s3fs.S3FileSystem()
    [weights] = [
        file["sha256"]
        for file in json.loads(files.cat_file(f"runs/team/{RUN}/index/adapter-000002.json"))["files"]
        if file["path"].endswith("adapter_model.safetensors")
    ]
    files.pipe_file(f"runs/team/{RUN}/objects/{weights}", b"x")
    here(tmp_path / "other", monkeypatch)
    with pytest.raises(ValueError, match=rf"{weights} is not what was copied there .*adapter_model.safetensors"):
        fetch(f"{URL}/{RUN}")
    assert not run_folder(RUN).exists()


def test_a_machine_that_was_away_cannot_go_on_beside_another(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    continued_elsewhere(tmp_path / "other", monkeypatch)
    make(2, content="another adapter")
    with pytest.raises(AnotherRun, match="has adapter-000003 of run 'mine' as another machine made it"):
        copy_run(RUN)
    index = json.loads(s3fs.S3FileSystem().cat_file(f"runs/team/{RUN}/index/step-000002.json"))
    other = tmp_path / "other/runs" / RUN / "steps/000002/manifest.json"
    assert any(file["num_bytes"] == other.stat().st_size for file in index["files"] if file["path"].endswith("manifest.json"))


def error_of(kind: type[Exception], message: str, **fields: object) -> Exception:
    """As adlfs 2026.8.0 and gcsfs 2026.8.2 raise them: seen with both, before a server that answers with these statuses."""
    error = kind(message)
    vars(error).update(fields)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (error_of(Exception, "no", status_code=403), "does not take .ratchet with these keys"),
        (error_of(Exception, "no", status_code=404), "does not exist, or cannot take .ratchet"),
        (error_of(Exception, "no access, 401", code=401), "does not take .ratchet with these keys"),
        (OSError("Forbidden: b/runs/o\nno access"), "does not take .ratchet with these keys"),
        (error_of(Exception, "busy", status_code=503), None),
        (OSError("reset"), None),
    ],
)
def test_what_other_stores_refuse_is_a_refusal(error: Exception, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    there = Remote("memory://runs")
    monkeypatch.setattr(there.files, "pipe_file", refuse)
    with pytest.raises(RemoteError, match=said or "cannot take") as refused:
        there.check()
    assert refused.value.is_refusal == (said is not None) and "\n" not in str(refused.value)


def test_another_run_of_the_same_name_is_refused(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_run(RUN)
    here(tmp_path / "other", monkeypatch)
    begin(1)
    with pytest.raises(AnotherRun, match="holds another run 'mine'"):
        copy_run(RUN)
    with pytest.raises(ValueError, match="this workspace has another run 'mine'"):
        fetch(f"{URL}/{RUN}")


def test_a_step_whose_files_are_only_half_there_is_not_in_the_store(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed: some objects are there, no index."""
    put = Remote.put
    sent = 0

    def killed(self: Remote, local: Path, name: str) -> None:
        nonlocal sent
        sent += 1
        if sent == 6:
            raise SystemExit(1)
        put(self, local, name)

    monkeypatch.setattr(Remote, "put", killed)
    with pytest.raises(SystemExit):
        copy_run(RUN)
    monkeypatch.setattr(Remote, "put", put)
    num_there = [run.num_steps for run in stored_runs(URL)]
    assert num_there in ([0], [1])
    assert copy_run(RUN) and stored_runs(URL)[0].num_steps == 2


def test_a_run_that_is_here_with_fewer_steps_is_not_overwritten(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copy_run(RUN)
    shutil.rmtree(step_folder_of(RUN, 1))
    with pytest.raises(ValueError, match="run mine is here with 1 steps, the store has 2"):
        fetch(f"{URL}/{RUN}")


def test_what_retention_removed_here_stays_in_the_store(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copying.copied_adapters(RUN) == set()
    assert copy_run(RUN) and copying.copied_adapters(RUN) == {1, 2}
    before = contents(run_folder(RUN))
    weights = adapter_folder(RUN, 1) / "adapter_model.safetensors"
    write_json(weights.with_name("removed.json"), {"files": [weights.name]})
    weights.unlink()
    RunFolder.of(RUN).copied.unlink()
    assert copy_run(RUN)
    here(tmp_path / "other", monkeypatch)
    fetch(f"{URL}/{RUN}")
    assert contents(run_folder(RUN)) == before


def test_a_removed_index_is_a_gap_that_is_named(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_run(RUN)
    s3fs.S3FileSystem().rm_file(f"runs/team/{RUN}/index/adapter-000001.json")
    here(tmp_path / "other", monkeypatch)
    with pytest.raises(ValueError, match="lacks adapter-000001"):
        fetch(f"{URL}/{RUN}")


def test_a_folder_is_a_store_too(
    workspace: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path_factory.mktemp("shared")  # not in the workspace
    url = str(shared)
    here(workspace, monkeypatch, url)
    begin()
    copying.check()
    assert copy_run(RUN) and waiting(RUN) == []
    assert not list(shared.rglob("*.partial"))
    before = contents(run_folder(RUN))
    here(tmp_path / "other", monkeypatch, None)
    fetch(f"{url}/{RUN}")
    assert contents(run_folder(RUN)) == before
    assert waiting(RUN) == [] and copying.copied_adapters(RUN) is None, "no store is configured"
    with pytest.raises(ValueError, match="holds no run: `ratchet runs --store"):
        fetch(f"{url}/other")
    for given in (url, f"{url}/"):
        with pytest.raises(ValueError, match=rf"^{given} is a store, not a run: give one of its runs, such as {url}/{RUN}$"):
            fetch(given)
    with pytest.raises(ValueError, match=r"^other holds no run: `ratchet runs --store \.` lists"):
        fetch("other")


def test_a_store_that_does_not_answer_is_an_error_of_its_own(store: Any) -> None:
    store.strike("503", times=10_000, methods=("GET", "HEAD"))
    with pytest.raises(RemoteError, match="s3://runs/team cannot list"):
        stored_runs(URL)


def test_an_evaluation_that_was_made_again_is_copied_again(store: Any) -> None:
    folder = RunFolder.of(RUN).evaluations / "000001-abc"
    write_json(folder / "evaluation.json", {"pass_at_1": 0.1})
    assert copy_run(RUN)
    write_json(folder / "evaluation.json", {"pass_at_1": 0.2})
    assert [part.name for part in waiting(RUN)] == ["evaluation-000001-abc"]
    assert copy_run(RUN) and waiting(RUN) == []
    assert read_json(RunFolder.of(RUN).copied)["url"] == URL


@pytest.mark.parametrize("url", [URL, "folder"])
def test_of_two_writers_of_an_index_one_writes_it(store: Any, tmp_path: Path, url: str) -> None:
    (tmp_path / "folder").mkdir()
    files = Remote(url if "://" in url else str(tmp_path / url))
    assert files.create("mine/index/step.json", b"first") is True
    assert files.create("mine/index/step.json", b"second") is False
    assert files.read("mine/index/step.json") == b"first"


def test_a_store_that_refuses_keeps_nothing_from_mlflow(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert copy_run(RUN)
    here(tmp_path / "other", monkeypatch)
    begin(1)
    delivered: list[str] = []
    monkeypatch.setattr(mlflow_store, "waiting", lambda run: [] if run in delivered else [run])
    monkeypatch.setattr(mlflow_store, "deliver", lambda run: delivered.append(run) or "id")
    assert upload.deliver_all() == [RUN] and delivered == [RUN]
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("s3://runs/team holds another run 'mine'")


def again(step: int) -> None:
    """Drop the steps from one on, and make that one again with other content."""
    upload.drop(RUN, step)
    make(step, content="another adapter")


@pytest.fixture
def manifests_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these steps name no adapter that a drop could check."""
    monkeypatch.setattr(lineage, "_check_can_go_on", lambda run, step: None)


@pytest.mark.usefixtures("manifests_are_short")
@pytest.mark.parametrize("is_away", [False, True])
def test_steps_that_were_dropped_and_made_again_are_copied_as_they_are_now(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    make(2)
    assert copy_run(RUN)
    store.strike("503", times=10_000 if is_away else 0, methods=EVERY)
    again(1)
    store.strike("", 0)
    assert ("step-000002" in {part.name for part in waiting(RUN)}) == is_away, "what is dropped here has to go there too"
    assert stored_runs(URL)[0].num_steps == (3 if is_away else 1)
    ownership.check_is_ours(RUN)
    assert copying.copied_adapters(RUN) == {1}, "retention keeps the new one until it is copied"
    assert copy_run(RUN) and waiting(RUN) == [] and stored_runs(URL)[0].num_steps == 2
    ownership.check_is_ours(RUN)
    before = contents(run_folder(RUN))
    here(tmp_path / "other", monkeypatch)
    fetch(f"{URL}/{RUN}")
    assert contents(run_folder(RUN)) == before


@pytest.mark.usefixtures("manifests_are_short")
def test_steps_are_not_dropped_in_the_store_where_another_machine_has_gone_on(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settings().workspace
    continued_elsewhere(tmp_path / "other", monkeypatch)
    with pytest.raises(AnotherRun, match="has step-000002 of run 'mine' as another machine made it"):
        upload.drop(RUN, 1)
    here(tmp_path / "other", monkeypatch)
    again(2)
    assert copy_run(RUN)
    here(first, monkeypatch)
    with pytest.raises(AnotherRun, match="has step-000002 of run 'mine' as another machine made it"):
        copy_run(RUN)
    assert stored_runs(URL)[0].num_steps == 3
    here(tmp_path / "other", monkeypatch)
    again(1)
    assert copy_run(RUN) and stored_runs(URL)[0].num_steps == 2
    here(first, monkeypatch)
    with pytest.raises(AnotherRun, match="has step-000001 of run 'mine' as another machine made it"):
        copy_run(RUN)


def test_a_drop_that_was_cut_off_leaves_the_store_without_a_gap(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(2)
    assert copy_run(RUN)
    remove, removed = Remote.remove, list[str]()

    def killed(self: Remote, name: str) -> None:
        if len(removed) == 3:
            raise SystemExit(1)
        removed.append(name)
        remove(self, name)

    monkeypatch.setattr(Remote, "remove", killed)
    with pytest.raises(SystemExit):
        upload.drop(RUN, 0)
    assert [name.rpartition("/")[2] for name in removed] == ["step-000002.json", "adapter-000003.json", "step-000001.json"]
    assert stored_runs(URL)[0][1:] == (1, 0.5, f"{URL}/{RUN}", "")
    monkeypatch.setattr(Remote, "remove", remove)
    assert copy_run(RUN) and stored_runs(URL)[0].num_steps == 0


@pytest.mark.usefixtures("manifests_are_short")
@pytest.mark.parametrize("is_whole", [False, True], ids=["of the last step", "whole"])
def test_a_drop_removes_also_what_the_store_has_without_a_note(store: Any, is_whole: bool) -> None:
    """A process that was killed after it had copied a step and before it had noted that; a note that was lost."""
    assert copy_run(RUN)
    note = RunFolder.of(RUN).copied
    if is_whole:
        note.unlink()
    else:
        content = read_json(note)
        del content["parts"]["step-000001"]
        write_json(note, content)
    again(0)
    assert copy_run(RUN) and waiting(RUN) == [] and stored_runs(URL)[0].num_steps == 1


def test_a_step_that_cannot_be_dropped_stays_in_the_store(store: Any) -> None:
    assert copy_run(RUN)
    with pytest.raises(ValueError, match="run 'mine' has no step 2 that could be dropped; its steps are 0, 1"):
        upload.drop(RUN, 2)
    assert waiting(RUN) == [] and stored_runs(URL)[0].num_steps == 2
