"""Bars on a terminal, few lines elsewhere."""

import io
import logging
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from infra.progress import bars
from infra.progress import work as progress
from infra.progress.work import Work


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(bars, "time", made)
    monkeypatch.setattr(progress, "time", made)
    return made


def lines_said(work: Work, clock: Clock, caplog: pytest.LogCaptureFixture, *, num_looks: int, per_look: float) -> list[str]:
    lines = bars.Lines(work)
    with caplog.at_level(logging.INFO, "infra"):
        for _ in range(num_looks):
            clock.now += 1.0
            work.done += per_look
            lines.look()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("num_samples", [64, 4096, 100_000])
def test_lines_are_as_few_for_many_samples_as_for_few(num_samples: int, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    work = Work("rollout", num_samples, "samples", began=clock.now)
    said = lines_said(work, clock, caplog, num_looks=5000, per_look=num_samples / 5000)
    assert 15 <= len(said) <= bars.LINES_IN_ALL + 1
    assert said[0].startswith("rollout: ")


def test_work_that_is_over_soon_has_no_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    soon = int(bars.LINE_EVERY_S) - 1
    work = Work("rollout", 64, "samples", began=clock.now)
    assert lines_said(work, clock, caplog, num_looks=soon, per_look=1) == []
    assert lines_said(Work("starting sglang", began=clock.now), clock, caplog, num_looks=soon, per_look=0) == []
    later = lines_said(Work("rollout", 640, "samples", began=clock.now), clock, caplog, num_looks=soon + 2, per_look=1)
    assert later == ["rollout: 60 of 640 samples, 580 s left"]


def test_work_without_a_known_end_says_less_and_less_often(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    said = lines_said(Work("starting sglang", began=clock.now), clock, caplog, num_looks=36_000, per_look=0)
    assert 8 <= len(said) <= 25


def test_no_bar_where_stdout_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    with progress.watched_by(bars.shown), progress.work("rollout", 4, "samples") as work:
        work.done = 4
    assert written.getvalue() == ""


def test_a_bar_on_a_terminal_says_all_and_log_lines_go_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, _environ={})
    stream = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("infra.test_bars")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "propagate", False)
    work = Work("rollout", 4, "samples", done=3, num_tokens=100)
    with bars._bar(console) as bar:
        bars.Bar(work, bar).look()
        bar.refresh()
        logger.warning("a line")
    logger.warning("another line")
    logger.removeHandler(handler)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rollout" in shown and "3 of 4 samples" in shown and "tokens/s" in shown and "75%" in shown
    assert "a line" in shown and stream.getvalue() == "another line\n"


def test_what_has_a_bar_of_its_own_gets_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, _environ={})
    monkeypatch.setattr(bars, "Console", type("Given", (Console,), {"__new__": lambda cls: console}))
    with progress.watched_by(bars.shown):
        with progress.work("fetching the model m", has_bar=True):
            pass
        assert console.file.getvalue() == ""  # type: ignore[attr-defined]
        with progress.work("rollout"):
            pass
        assert "rollout" in console.file.getvalue()  # type: ignore[attr-defined]


def test_two_pieces_of_work_at_once_have_one_display(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, _environ={})
    monkeypatch.setattr(bars, "Console", type("Given", (Console,), {"__new__": lambda cls: console}))
    with progress.watched_by(bars.shown), progress.work("training"):
        display = bars.DISPLAY._bar
        with progress.work("rollout"):
            assert bars.DISPLAY._bar is display and display is not None and len(display.tasks) == 2
        assert len(display.tasks) == 1
    assert bars.DISPLAY._bar is None


def test_a_bar_knows_the_part_that_its_work_is_at() -> None:
    bar = Progress()
    work = Work("loading weights")
    watch = bars.Bar(work, bar)
    work.restart("training", 8, "micro-batches", done=2)
    watch.look()
    assert (bar.tasks[0].description, bar.tasks[0].total, bar.tasks[0].completed) == ("training", 8, 2)
