"""Copies of a step that is not committed: whole or not used, of one writer, removed after the commit, and continued on another machine."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shared import becomes, load_module, sample

from infra.engines.journal import Journal
from infra.mirror import copying, remote
from infra.mirror import under_way as under_way_module
from infra.mirror.copying import AnotherRun
from infra.mirror.fetching import fetch, stored_runs
from infra.mirror.remote import Remote, RemoteError
from infra.mirror.under_way import copied_under_way, copy_run, copy_under_way
from infra.rewards.outcome import Outcome
from infra.rewards.scores import ScoreJournal
from infra.settings import settings
from infra.store.files import new_id, record_of, write_json
from infra.store.layout import RunFolder, StepFolder, run_folder
from infra.store.samples import read_samples, write_samples

neighbours = load_module(Path(__file__).with_name("test_copying.py"))
RUN, URL, s3, store, here, make = (getattr(neighbours, name) for name in ("RUN", "URL", "s3", "store", "here", "make"))
FENCE = {"adapter": "a"}
NUM_ATTEMPTS = 10_000


@pytest.fixture
def folder(workspace: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store in a folder outside of the workspace, with a run of two steps here."""
    shared = tmp_path_factory.mktemp("shared")
    here(workspace, monkeypatch, str(shared))
    neighbours.begin()
    assert copy_run(RUN)
    return shared


def under_way() -> list[str]:
    return Remote(str(settings().store_url)).names(f"{RUN}/under-way")


def fetched() -> None:
    fetch(f"{settings().store_url}/{RUN}")


def journal_of(step: int, first: int, count: int) -> Path:
    path = StepFolder.at(RUN, step).journal
    path.parent.mkdir(parents=True, exist_ok=True)
    with Journal(path, FENCE) as journal:
        for number in range(first, first + count):
            journal.add(replace(sample(4), sample_index=number))
    return path


def kept(step: int) -> list[int]:
    with Journal(StepFolder.at(RUN, step).journal, FENCE) as journal:
        return sorted(index for _, index in journal.samples)


def finished(step: int, text: str = "") -> StepFolder:
    made = StepFolder.at(RUN, step)
    write_samples(made.samples, [replace(sample(5), text=text)])
    write_json(made.samples_inputs, {"inputs": FENCE, "file": record_of(made.samples).model_dump()})
    return made


def bytes_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the pieces that are sent from now on."""
    sent, replace_object = list[int](), Remote.replace

    def noted(self: Remote, name: str, data: bytes) -> None:
        if not name.endswith("index.json"):
            sent.append(len(data))
        replace_object(self, name, data)

    monkeypatch.setattr(Remote, "replace", noted)
    return sent


def copied() -> int:
    return copy_under_way(Remote(str(settings().store_url)), RUN)


def test_samples_of_a_step_under_way_are_continued_on_another_machine(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copy_run(RUN)
    path = journal_of(2, 0, 3)
    finished(3)
    path.write_bytes(path.read_bytes()[:-5])  # a line that is being written
    assert copied() == 3
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert path.relative_to(tmp_path) and StepFolder.at(RUN, 2).journal.read_bytes().endswith(b"\n")
    assert kept(2) == [0, 1], "up to the last complete line"
    assert [each.prompt_id for each in read_samples(StepFolder.at(RUN, 3).samples)] == [5]
    assert StepFolder.at(RUN, 3).samples_inputs.exists()


def test_a_run_that_was_lost_in_its_first_step_is_continued_with_its_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    here(tmp_path / "first", monkeypatch, str(folder))
    new_id(run_folder(RUN))
    write_json(RunFolder.of(RUN).config, {"name": RUN})
    before = RunFolder.of(RUN).config.read_bytes()
    assert copied() == 0, "no sample, no copy"
    journal_of(0, 0, 2)
    assert copied() == 3
    assert stored_runs(str(folder)) == [(RUN, 0, None, f"{folder}/{RUN}", "")]
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert RunFolder.of(RUN).config.read_bytes() == before and kept(0) == [0, 1]


def test_a_folder_that_does_not_exist_is_no_store_without_runs(tmp_path: Path) -> None:
    assert stored_runs(str(tmp_path)) == []
    for url in (f"{tmp_path}/nowhere", f"file://{tmp_path}/nowhere"):
        with pytest.raises(ValueError, match=f"^store {url} does not exist: give a folder that is there, or s3://"):
            stored_runs(url)


def test_a_later_copy_replaces_the_one_before_and_the_commit_removes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal_of(2, 0, 1)
    assert copied() == 1
    first = under_way()
    journal_of(2, 1, 1)
    assert copied() == 1
    assert len(first) == 2 and len(under_way()) == 3, "the journal's two pieces and the index"
    sent = bytes_sent(monkeypatch)
    assert copied() == 1 and sent == [], "all of it is there"
    samples = finished(2)
    samples.journal.unlink()
    make(2)
    assert copied() == 2 and len(under_way()) == 3, "the machine may be lost before the step itself is copied"
    assert copy_run(RUN) and under_way() == []
    assert copied() == 0


def test_a_journal_is_sent_piece_by_piece_and_joined_on_another_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = bytes_sent(monkeypatch)
    for number in range(6):
        path = journal_of(2, number, 1)
        assert copied() == 1
    whole = path.read_bytes()
    assert sum(sent) == len(whole) and len(sent) == 6, "nothing is sent twice"
    monkeypatch.setattr(under_way_module, "MAX_PIECES", 6)
    path = journal_of(2, 6, 1)
    assert copied() == 1 and sent[6:] == [len(path.read_bytes())] and len(under_way()) == 2, "too many pieces become one"
    path = journal_of(2, 7, 1)
    assert copied() == 1
    whole = path.read_bytes()
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert StepFolder.at(RUN, 2).journal.read_bytes() == whole and kept(2) == [*range(8)]


def test_what_rewards_have_judged_is_continued_on_another_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal_of(2, 0, 1)
    path = StepFolder.at(RUN, 2).scores_journal
    with ScoreJournal(path, FENCE) as journal:
        journal.add(("f", 4, 0, "d"), Outcome(0.5, {}))
    assert copied() == 2
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    with ScoreJournal(StepFolder.at(RUN, 2).scores_journal, FENCE) as journal:
        assert journal.outcomes == {("f", 4, 0, "d"): Outcome(0.5, {})}


def test_a_journal_that_was_written_again_is_sent_again_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal_of(2, 0, 2)
    assert copied() == 1
    first = under_way()
    StepFolder.at(RUN, 2).journal.unlink()
    path = journal_of(2, 5, 3)
    sent = bytes_sent(monkeypatch)
    assert copied() == 1 and sent == [path.stat().st_size]
    assert len(under_way()) == 2 and under_way() != first


def test_a_piece_that_is_gone_from_the_store_is_sent_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal_of(2, 0, 1)
    assert copied() == 1
    [piece] = [name for name in under_way() if name != "index.json"]
    (folder / RUN / "under-way" / piece).unlink()
    journal_of(2, 1, 1)
    assert copied() == 1
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert kept(2) == [0, 1]


def test_a_copy_of_an_earlier_version_is_continued(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = journal_of(2, 0, 1)
    assert copied() == 1
    index = folder / RUN / "under-way/index.json"
    content = json.loads(index.read_text())
    for file in content["files"]:
        del file["pieces"]
    index.write_text(json.dumps(content))
    first = settings().workspace
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert kept(2) == [0]
    here(first, monkeypatch, str(folder))
    sent, size = bytes_sent(monkeypatch), path.stat().st_size
    path = journal_of(2, 1, 1)
    assert copied() == 1 and sent == [path.stat().st_size - size]


def test_a_copy_older_than_the_commit_is_not_fetched(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal_of(2, 0, 1)
    assert copied() == 1
    StepFolder.at(RUN, 2).journal.unlink()
    make(2)
    assert copying.copy_run(RUN) and under_way(), "killed before the copy was removed"
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert StepFolder.at(RUN, 2).manifest.exists() and not StepFolder.at(RUN, 2).journal.exists()


def test_an_upload_that_breaks_off_leaves_the_copy_before_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copy_run(RUN)
    journal_of(2, 0, 1)
    assert copied() == 1
    journal_of(2, 1, 1)
    finished(3)
    writes, put = [], Remote.replace

    def killed(self: Remote, name: str, data: bytes) -> None:
        writes.append(name)
        if len(writes) == 3:
            raise SystemExit(1)
        put(self, name, data)

    monkeypatch.setattr(Remote, "replace", killed)
    with pytest.raises(SystemExit):
        copied()
    monkeypatch.setattr(Remote, "replace", put)
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert kept(2) == [0] and not StepFolder.at(RUN, 3).samples.exists()


def test_a_copy_with_a_changed_object_is_left_out_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert copy_run(RUN)
    journal_of(2, 0, 1)
    finished(3)
    copied()
    [one, *_] = [name for name in under_way() if name != "index.json"]
    (folder / RUN / "under-way" / one).write_bytes(b"x")
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    assert not StepFolder.at(RUN, 2).path.exists() and not StepFolder.at(RUN, 3).path.exists()
    assert "the samples of the step under way are made again" in caplog.text
    journal_of(2, 0, 1)
    assert copied() == 1, "the run is this machine's now all the same"


def test_samples_and_the_note_about_them_are_copied_together_or_not_at_all(folder: Path) -> None:
    made = finished(2)
    write_samples(made.samples, [replace(sample(5), text="made again")])
    assert copied() == 0, "the note is about other samples"
    finished(2)
    assert copied() == 2


def test_of_two_machines_that_continue_a_run_the_first_is_told_and_overwrites_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settings().workspace
    assert copy_run(RUN)
    journal_of(2, 0, 1)
    copied()
    here(tmp_path / "other", monkeypatch, settings().store_url)
    fetched()
    journal_of(2, 1, 1)
    assert copied() == 1, "it goes on from the first one's copy"
    theirs = under_way()
    here(first, monkeypatch, str(folder))
    journal_of(2, 7, 1)
    with pytest.raises(AnotherRun, match="has the step under way of run 'mine' as another machine makes it"):
        copied()
    assert under_way() == theirs


@pytest.mark.parametrize("fault", ["503", "hang"])
def test_a_store_that_is_away_is_one_line_and_the_next_interval_copies(
    store: Any, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RATCHET_STORE_EVERY_S", "1")
    settings.cache_clear()
    assert copy_run(RUN)
    journal_of(2, 0, 1)
    store.strike(fault, times=NUM_ATTEMPTS, methods=("PUT", "POST", "GET", "HEAD"))
    monkeypatch.setattr(remote, "ANSWER_S", 2.0 if fault == "hang" else remote.ANSWER_S)
    with caplog.at_level(logging.WARNING, "infra.mirror"), copied_under_way(RUN):
        assert becomes(lambda: "is not copied" in caplog.text, within_s=60)
        time.sleep(1.5)  # the next attempt fails too, without a line
        monkeypatch.setattr(remote, "ANSWER_S", 30.0)
        store.strike("", 0)
        assert becomes(lambda: len(store_names()) == 2, within_s=60)
        StepFolder.at(RUN, 2).journal.unlink()
        make(2)
    ours = [record for record in caplog.records if record.name.startswith("infra") and record.levelno >= logging.WARNING]
    assert [record.name for record in ours] == ["infra.mirror.under_way"]
    assert "the next attempt is in 1 s" in caplog.text
    assert becomes(lambda: store_names() == [], within_s=30), "the commit removed it"


def store_names() -> list[str]:
    with suppress(FileNotFoundError, RemoteError):
        return Remote(URL).names(f"{RUN}/under-way")
    return []


def test_a_step_does_not_wait_for_a_store_that_is_known_to_be_away(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RATCHET_STORE_EVERY_S", "1")
    settings.cache_clear()
    assert copy_run(RUN)
    journal_of(2, 0, 1)
    with caplog.at_level(logging.WARNING, "infra.mirror"), copied_under_way(RUN):
        assert becomes(lambda: len(store_names()) == 2, within_s=60)
        monkeypatch.setattr(remote, "ANSWER_S", 5.0)
        store.strike("hang", times=NUM_ATTEMPTS, methods=("PUT", "POST", "GET", "HEAD", "DELETE"))
        assert becomes(lambda: "is not copied" in caplog.text, within_s=60)
        ends_at = time.monotonic()
    assert time.monotonic() - ends_at < 4
    store.strike("", 0)


@pytest.mark.parametrize("seconds", ["0.5", "-1", "90000"])
def test_an_interval_out_of_range_is_refused(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_STORE_EVERY_S", seconds)
    settings.cache_clear()
    with pytest.raises(ValueError, match="RATCHET_STORE_EVERY_S"):
        settings()


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    yield
    settings.cache_clear()
