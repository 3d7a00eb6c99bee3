"""Paid answers of models that judge are in the copies of a run: with what they were paid for, once, and in the budget of the machine that goes on."""

import logging
from pathlib import Path

import pytest
from shared import load_module

from infra.mirror.copying import waiting
from infra.mirror.fetching import fetch
from infra.mirror.remote import Remote
from infra.mirror.under_way import copy_run, copy_under_way
from infra.rewards.judges.cases import JudgeAnswer
from infra.rewards.judges.ledger import Ledger, evaluation_work, step_work
from infra.settings import settings
from infra.store.files import write, write_json
from infra.store.layout import EVALUATION, PAID, RunFolder, StepFolder, run_folder
from tasks.rewards.by_model import keep_paid

neighbours = load_module(Path(__file__).with_name("test_under_way.py"))
RUN, here, folder, journal_of, make, under_way, fresh_settings = (
    getattr(neighbours, name) for name in ("RUN", "here", "folder", "journal_of", "make", "under_way", "fresh_settings")
)
TOKENS = (100, 10)


def pay(work: str, *keys: str, run: str = RUN) -> None:
    with Ledger() as ledger:
        for key in keys:
            ledger.add(run, work, key, JudgeAnswer(f"of {key}", "stop", *TOKENS))


def known() -> dict[str, str]:
    with Ledger() as ledger:
        return {key: answer.text for key, answer in ledger.found("abcdefgh").items()}


def num_paid(work: str | None = None) -> int:
    with Ledger() as ledger:
        return ledger.spent(RUN, work).requests


def copied() -> int:
    return copy_under_way(Remote(str(settings().store_url)), RUN)


def on_another_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(path, monkeypatch, settings().store_url)
    fetch(f"{settings().store_url}/{RUN}")


def test_what_a_step_under_way_has_paid_is_not_paid_again_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal_of(2, 0, 1)
    pay(step_work(2), "a", "b")
    pay(step_work(2), "h", run="other")
    assert copied() == 2
    sent = neighbours.bytes_sent(monkeypatch)
    pay(step_work(2), "c")
    assert copied() == 2
    with Ledger() as ledger:
        assert sent == [len(ledger.paid(RUN, step_work(2)).splitlines(keepends=True)[-1])], "an answer is sent once"
    on_another_machine(tmp_path / "other", monkeypatch)
    assert known() == {"a": "of a", "b": "of b", "c": "of c"}, "of this run alone"
    assert num_paid(step_work(2)) == num_paid() == 3
    pay(step_work(2), "d")
    assert copied() == 2, "the copy is continued from what was fetched"
    neighbours.neighbours.shutil.rmtree(run_folder(RUN))
    fetch(f"{settings().store_url}/{RUN}")
    assert num_paid() == 4, "a payment counts once, however often the run is fetched"


def test_payments_of_steps_and_evaluations_that_are_complete_are_in_the_budget_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay(step_work(2), "a", "b")
    keep_paid(StepFolder.at(RUN, 2).paid, RUN, step_work(2))
    make(2)
    evaluated = RunFolder.of(RUN).evaluations / "000002-abc-set"
    pay(evaluation_work(2), "c")
    keep_paid(evaluated / PAID, RUN, evaluation_work(2))
    write_json(evaluated / EVALUATION, {"pass_at_1": 0.1})
    assert copied() == 2, "until they are copied with the rest"
    assert copy_run(RUN) and waiting(RUN) == [] and under_way() == []
    assert copied() == 0
    on_another_machine(tmp_path / "other", monkeypatch)
    assert (num_paid(step_work(2)), num_paid(evaluation_work(2)), len(known())) == (2, 1, 3)


def test_an_evaluation_under_way_takes_its_paid_answers_along(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(RunFolder.of(RUN).evaluations / "000002-abc-set/prompts.jsonl", b"")
    pay(evaluation_work(2), "a")
    assert copied() == 1
    on_another_machine(tmp_path / "other", monkeypatch)
    assert num_paid(evaluation_work(2)) == 1 and known() == {"a": "of a"}


def test_paid_answers_that_cannot_be_read_are_one_line_and_nothing_is_fetched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(StepFolder.at(RUN, 2).paid, b'{"key": "a"}\n')
    make(2)
    assert copy_run(RUN)
    with pytest.raises(ValueError, match=r"^the paid answers of step 2 of run 'mine' cannot be read: KeyError\('at'\)$"):
        on_another_machine(tmp_path / "other", monkeypatch)
    assert not run_folder(RUN).exists() and num_paid() == 0


def test_a_workspace_without_a_judge_gets_no_ledger(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal_of(2, 0, 1)
    keep_paid(StepFolder.at(RUN, 2).paid, RUN, step_work(2))
    with caplog.at_level(logging.INFO):
        assert copied() == 1
    assert not (settings().workspace / "judgements.sqlite").exists() and not StepFolder.at(RUN, 2).paid.exists()
