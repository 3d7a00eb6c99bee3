"""The table of failures: what fits where, when it is tried again, and that the page shows the table as it is."""

import errno
from pathlib import Path

import pytest
from pydantic import ValidationError

from infra import failures
from infra.config import SamplingConfig
from infra.failures import (
    DigestMismatch,
    EngineCrashedAgain,
    EngineOutOfMemory,
    EngineRefused,
    EngineUnavailable,
    NodeLost,
    NoNodeForEngine,
    TrainerLost,
    TrainerOutOfMemory,
    TrainingFailed,
    WrongAnswer,
    classify,
    verdict,
)

PAGE = Path(__file__).parents[2] / "docs/failures.md"


def invalid() -> ValidationError:
    try:
        SamplingConfig(group_size=0)
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "name", "num_attempts"),
    [
        (EngineUnavailable("gone"), "engine unavailable", 4),
        (EngineCrashedAgain("assert", "Traceback"), "engine crashed again", 1),
        (EngineOutOfMemory("full"), "engine out of memory", 4),
        (NodeLost("silent"), "node lost", 4),
        (NoNodeForEngine("one is left"), "no node for the engine", 1),
        (TrainerLost("killed"), "trainer lost", 3),
        (TrainerOutOfMemory("full"), "trainer out of memory", 1),
        (TrainingFailed("nan"), "training failed", 1),
        (EngineRefused("HTTP 400"), "request refused", 1),
        (WrongAnswer("nan"), "wrong answer", 1),
        (DigestMismatch("changed"), "file changed", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "disk full", 1),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk full", 1),
        (OSError(errno.EFBIG, "File too large"), "disk full", 1),
        (ValueError("bad"), "bad input", 1),
        (invalid(), "bad input", 1),
        (OSError(errno.EIO, "Input/output error"), "not classified", 1),
        (TimeoutError("slow"), "not classified", 1),
        (AssertionError(), "not classified", 1),
        (KeyboardInterrupt(), "not classified", 1),
    ],
)
def test_an_error_has_one_class_and_what_is_in_none_is_not_retried(error: BaseException, name: str, num_attempts: int) -> None:
    assert classify(error).name == name
    tries = [verdict(error, num_attempts=n, trouble_s=0).is_retried for n in range(1, 6)]
    assert tries == [n < num_attempts for n in range(1, 6)]


def test_what_is_left_of_the_deadline_must_hold_the_wait() -> None:
    def is_retried(trouble_s: float) -> bool:
        return verdict(EngineUnavailable("gone"), num_attempts=2, trouble_s=trouble_s).is_retried

    assert [is_retried(trouble_s) for trouble_s in (0, 1790, 1790.1, 5000)] == [True, True, False, False]


def test_the_end_says_class_cure_attempts_and_deadline() -> None:
    last = verdict(TrainerLost("killed"), num_attempts=3, trouble_s=12.4).text
    for part in ("trainer lost", "the same job again", "attempt 3 of 3", "12 s since", "deadline 5400 s", "no attempt is left"):
        assert part in last
    assert "no time is left" in verdict(TrainerLost("killed"), num_attempts=2, trouble_s=6000).text
    assert "not retried" in verdict(KeyError("x"), num_attempts=1, trouble_s=0).text


def test_waits_grow_and_are_always_the_same() -> None:
    assert [failures.backoff_s(n) for n in range(1, 6)] == [2, 10, 30, 30, 30]


def test_the_page_shows_the_table_of_the_code() -> None:
    assert failures.table() in PAGE.read_text(), f"put this into {PAGE}:\n{failures.table()}"
