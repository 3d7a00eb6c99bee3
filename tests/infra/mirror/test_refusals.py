"""What a store refuses, and what is refused of a store, in one line: addresses, keys, folders, damaged files, runs of other machines."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs
from shared import load_module

from infra.config import RunConfig
from infra.failures import StoreRefused
from infra.mirror import copying, ownership
from infra.mirror.copying import AnotherRun
from infra.mirror.fetching import fetch, stored_runs
from infra.mirror.ownership import check_is_ours
from infra.mirror.remote import AddressRefused, Remote, RemoteError
from infra.mirror.under_way import copy_run, copy_under_way
from infra.runs import lineage
from infra.settings import settings
from infra.store.files import new_id, write_json
from infra.store.layout import RunFolder, StepFolder, run_folder
from infra.tracking import upload

under_way_tests = load_module(Path(__file__).with_name("test_under_way.py"))
copying_tests = under_way_tests.neighbours
RUN, here, make, begin = (getattr(copying_tests, name) for name in ("RUN", "here", "make", "begin"))
folder, fresh_settings, journal_of = (getattr(under_way_tests, name) for name in ("folder", "fresh_settings", "journal_of"))
s3, store = copying_tests.s3, copying_tests.store


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", r"^store '' is empty or has spaces around it: give s3://BUCKET/FOLDER, gs://, az:// or a folder$"),
        (" s3://runs/team", r"^store ' s3://runs/team' is empty or has spaces"),
        ("s3://runs/team ", r"^store 's3://runs/team ' is empty or has spaces"),
        ("s3:/runs/team", r"^store 's3:/runs/team' has a colon and no slashes after it: give s3://BUCKET/FOLDER"),
        ("s3://", r"^store 's3://' names no bucket"),
        ("s3:///team", r"^store 's3:///team' names no bucket"),
        ("file://mnt/runs", r"^store 'file://mnt/runs' has no absolute path: give file:///mnt/runs, or a folder$"),
        ("file://", r"^store 'file://' names no folder"),
        ("dbfs://runs", r"^store dbfs://runs cannot be used: TypeError: "),
    ],
)
def test_an_address_that_would_mean_another_place_is_refused(url: str, said: str) -> None:
    with pytest.raises(AddressRefused, match=said):
        Remote(url)


@pytest.mark.parametrize(
    ("url", "taken"),
    [("", None), ("s3://runs/team//", "s3://runs/team"), ("/mnt/runs/", "/mnt/runs"), ("~/runs", "~/runs")],
)
def test_the_address_of_the_store_is_taken_without_what_says_nothing(
    url: str, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_STORE_URL", url)
    settings.cache_clear()
    assert settings().store_url == taken


def test_a_folder_that_each_program_would_seek_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_STORE_URL", "runs")
    settings.cache_clear()
    with pytest.raises(
        ValueError, match="RATCHET_STORE_URL 'runs' is no absolute path and no address: give a folder such as /mnt/"
    ):
        settings()


def test_a_wrong_address_stops_a_run_before_it_begins_and_an_upload_in_one_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here(workspace, monkeypatch, "s3://runs/team ")
    begin()
    with pytest.raises(StoreRefused, match=r"^RATCHET_STORE_URL: store 's3://runs/team ' is empty or has spaces around it"):
        copying.check()
    monkeypatch.setattr(upload, "DESTINATIONS", upload.DESTINATIONS[:1])
    assert upload.deliver_all() == [RUN]
    assert "Traceback" not in caplog.text and "store 's3://runs/team ' is empty or has spaces" in caplog.text


def test_a_store_without_any_keys_stops_a_run_before_it_begins(
    store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreRefused, match=r"s3://runs/team does not take \.ratchet with these keys: NoCredentialsError"):
        copying.check()
    s3fs.S3FileSystem.clear_instance_cache()


def test_keys_that_expire_in_the_middle_are_a_refusal(store: Any) -> None:
    store.strike("expired", times=10_000, methods=("PUT", "GET", "HEAD"))
    with pytest.raises(StoreRefused, match=r"does not take \.ratchet with these keys: PermissionError: .*expired"):
        copying.check()
    assert copy_run(RUN) is False
    store.strike("", 0)
    assert copy_run(RUN)


def test_a_disk_that_is_not_mounted_gets_no_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copying.check()
    shutil.rmtree(folder)
    with pytest.raises(
        StoreRefused, match=rf"{folder} does not exist, or cannot take .*: make it, or mount the disk that has it$"
    ):
        copying.check()
    make(2)
    assert copy_run(RUN) is False and not folder.exists()
    assert f"there is no folder {folder}" in caplog.text
    with pytest.raises(ValueError, match="does not exist: give a folder that is there"):
        fetch(f"{folder}/{RUN}")


def test_a_store_in_the_workspace_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "runs").mkdir(exist_ok=True)
    (workspace.parent / "link").symlink_to(workspace)
    for url in (workspace, workspace / "runs", workspace.parent / "link/runs", f"file://{workspace}/runs"):
        here(workspace, monkeypatch, str(url))
        with pytest.raises(
            StoreRefused, match=rf"^RATCHET_STORE_URL: store {url} lies in the workspace {workspace} and would be lost"
        ):
            copying.check()


def test_a_run_that_is_here_with_other_steps_than_the_store_s_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = settings().workspace
    here(tmp_path / "other", monkeypatch, None)
    assert fetch(f"{folder}/{RUN}") == RUN
    assert f"RATCHET_STORE_URL is not set: what run {RUN} makes from here on is copied nowhere" in caplog.messages
    here(first, monkeypatch, str(folder))
    monkeypatch.setattr(lineage, "_check_can_go_on", lambda run, step: None)  # these manifests name no adapter
    upload.drop(RUN, 1)
    make(1, content="another adapter")
    assert copy_run(RUN)
    here(tmp_path / "other", monkeypatch, None)
    with pytest.raises(ValueError, match=f"run {RUN} is here with another step-000001 than the store's: leave --from out"):
        fetch(f"{folder}/{RUN}")


def test_runs_of_a_folder_are_listed_beside_whatever_else_is_there(folder: Path) -> None:
    copying.check()
    (folder / "notes.txt").write_text("x")
    assert [run.name for run in stored_runs(str(folder))] == [RUN]


@pytest.mark.parametrize("place", ["index", "report", "gap"])
def test_a_damaged_run_does_not_hide_the_others(
    folder: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / RUN, folder / "sound")
    index = folder / RUN / "index/step-000001.json"
    if place == "index":
        index.write_text("{")
    elif place == "report":
        [report] = [file for file in json.loads(index.read_text())["files"] if file["path"].endswith("/report.json")]
        (folder / RUN / "objects" / report["sha256"]).write_text("{")
    else:
        (folder / RUN / "index/adapter-000001.json").unlink()
    damaged, sound = stored_runs(str(folder))
    assert damaged.name == RUN and (sound.num_steps, sound.last_reward, sound.trouble) == (2, 1.5, "")
    assert {"index": "is no index that this version", "report": "is not what was copied there", "gap": "lacks adapter-000001"}[
        place
    ] in damaged.trouble


def test_a_listing_that_lags_behind_hides_no_step(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(2)
    assert copy_run(RUN)
    names, hidden = (
        Remote.names,
        {"step-000001.json", "step-000002.json", "adapter-000002.json", "adapter-000003.json", "run.json"},
    )
    monkeypatch.setattr(Remote, "names", lambda self, place: [name for name in names(self, place) if name not in hidden])
    assert stored_runs(str(folder))[0][:4] == (RUN, 3, 2.5, f"{folder}/{RUN}")
    here(tmp_path / "other", monkeypatch, str(folder))
    fetch(f"{folder}/{RUN}")
    assert (run_folder(RUN) / "steps/000002/manifest.json").exists()


def test_a_run_goes_on_before_a_damaged_step_whose_indices_are_removed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step-000001.json", "adapter-000002.json"):
        (folder / RUN / "index" / name).unlink()
    here(tmp_path / "other", monkeypatch, str(folder))
    fetch(f"{folder}/{RUN}")
    check_is_ours(RUN)
    make(1, content="again")
    assert copy_run(RUN) and stored_runs(str(folder))[0].num_steps == 2


def test_a_path_outside_of_the_run_is_not_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = folder / RUN / "index/step-000001.json"
    index.write_text(index.read_text().replace("runs/mine/steps/000001/report.json", "runs/mine/../../../outside"))
    here(tmp_path / "other", monkeypatch, str(folder))
    with pytest.raises(ValueError, match="is no index that this version of Ratchet can read"):
        fetch(f"{folder}/{RUN}")
    assert not list(tmp_path.rglob("outside")) and not run_folder(RUN).exists()


def test_a_run_that_was_renamed_in_the_store_is_not_continued(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / RUN).rename(folder / "renamed")
    here(tmp_path / "other", monkeypatch, str(folder))
    with pytest.raises(ValueError, match=r"names 'runs/mine/.*', no file of run 'renamed': give it its own name again"):
        fetch(f"{folder}/renamed")
    assert not run_folder("renamed").exists()


@pytest.mark.parametrize("url", ["s3://runs", "s3://"])
def test_an_address_without_a_run_says_what_one_looks_like(url: str, workspace: Path) -> None:
    with pytest.raises(ValueError, match=f"^{url} names no run: give s3://BUCKET/FOLDER/RUN, as `ratchet runs --store"):
        fetch(url)


def test_a_store_that_goes_away_while_a_run_is_fetched_costs_no_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal_of(2, 0, 1)
    assert copy_under_way(Remote(str(folder)), RUN) == 1
    here(tmp_path / "other", monkeypatch, str(folder))
    read = Remote.read

    def away(self: Remote, name: str, num_bytes: int = 0) -> bytes | None:
        if "/under-way/" in name:
            raise RemoteError("away")
        return read(self, name, num_bytes)

    monkeypatch.setattr(Remote, "read", away)
    with pytest.raises(RemoteError, match="away"):
        fetch(f"{folder}/{RUN}")
    assert not run_folder(RUN).exists(), "or the samples would be made again"
    monkeypatch.setattr(Remote, "read", read)
    (folder / RUN / "under-way/index.json").write_text("{")
    fetch(f"{folder}/{RUN}")
    assert "is no index that this version of Ratchet can read" in caplog.text and run_folder(RUN).exists()


# -- two machines


@pytest.fixture
def other(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Be the first machine, or the other one."""
    first = settings().workspace

    def be(which: str) -> None:
        here(first if which == "first" else tmp_path / "other", monkeypatch, str(folder))

    return be


def test_a_new_run_of_a_name_that_the_store_has_is_refused_before_it_begins(folder: Path, other: Callable[[str], None]) -> None:
    check_is_ours(RUN)
    other("other")
    check_is_ours("new")
    with pytest.raises(
        AnotherRun, match=f"holds a run 'mine' that is not here: `ratchet run --from {folder}/mine` goes on with it"
    ):
        check_is_ours(RUN)
    new_id(run_folder(RUN))
    write_json(RunFolder.of(RUN).config, {"name": RUN})
    with pytest.raises(AnotherRun, match="holds another run 'mine'"):
        check_is_ours(RUN)


def test_a_new_run_of_a_name_whose_first_step_another_machine_makes_is_refused(
    folder: Path, other: Callable[[str], None]
) -> None:
    new_id(run_folder("new"))
    write_json(RunFolder.of("new").config, {"name": "new"})
    StepFolder.at("new", 0).path.mkdir(parents=True)
    journal_of(0, 0, 1).rename(StepFolder.at("new", 0).journal)
    assert copy_under_way(Remote(str(folder)), "new") == 3
    check_is_ours("new")
    other("other")
    with pytest.raises(
        AnotherRun, match=f"holds a run 'new' that is not here: `ratchet run --from {folder}/new` goes on with it"
    ):
        check_is_ours("new")


def test_the_machine_whose_run_goes_on_elsewhere_stops_at_its_next_step(folder: Path, other: Callable[[str], None]) -> None:
    other("other")
    fetch(f"{folder}/{RUN}")
    check_is_ours(RUN)
    make(2, content="theirs")
    other("first")
    check_is_ours(RUN)
    other("other")
    assert copy_run(RUN)
    check_is_ours(RUN)
    other("first")
    with pytest.raises(AnotherRun, match="has step-000002 of run 'mine' as another machine made it: stop this run"):
        check_is_ours(RUN)
    copying_tests.commit(RunConfig(name=RUN), 2, {}, attempt="ours")
    with pytest.raises(AnotherRun, match="has step-000002 of run 'mine' as another machine made it"):
        check_is_ours(RUN)


def test_the_machine_whose_step_under_way_goes_on_elsewhere_is_told(
    folder: Path, other: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    journal_of(2, 0, 1)
    assert copy_under_way(Remote(str(folder)), RUN) == 1
    other("other")
    fetch(f"{folder}/{RUN}")
    assert f"another machine copied run {RUN} 0 s ago: if it still makes it, stop it there" in caplog.text
    assert copy_under_way(Remote(str(folder)), RUN) == 1
    check_is_ours(RUN)
    other("first")
    with pytest.raises(AnotherRun, match="has the step under way of run 'mine' as another machine makes it"):
        check_is_ours(RUN)


def test_a_store_that_is_away_says_nothing_about_other_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*given: object) -> None:
        raise RemoteError("away")

    monkeypatch.setattr(copying, "there", away)
    RunFolder.of(RUN).copied.unlink()
    check_is_ours(RUN)
    monkeypatch.setattr(ownership, "Remote", away)
    monkeypatch.setattr(copying, "_away", {str(folder): time.monotonic()})
    check_is_ours(RUN)
