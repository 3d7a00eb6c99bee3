"""Work that is counted, and whoever looks at it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infra.progress import work as progress
from infra.progress.work import Work


def recorder(seen: list[str], name: str) -> progress.Watcher:
    @contextmanager
    def watch(work: Work) -> Iterator[None]:
        seen.append(f"{name} begins {work.what}")
        try:
            yield
        finally:
            seen.append(f"{name} leaves at {work.done:g}")

    return watch


def test_work_is_watched_from_its_beginning_to_its_end_also_when_it_fails() -> None:
    seen: list[str] = []
    with (
        progress.watched_by(recorder(seen, "a"), recorder(seen, "b")),
        pytest.raises(ZeroDivisionError),
        progress.work("rollout", 3) as work,
    ):
        work.done += 2
        raise ZeroDivisionError
    assert seen == ["a begins rollout", "b begins rollout", "b leaves at 2", "a leaves at 2"]


def test_work_that_is_watched_already_is_not_watched_twice() -> None:
    seen: list[str] = []
    with progress.watched_by(recorder(seen, "outer")), progress.watched_by(recorder(seen, "inner")), progress.work("x"):
        pass
    assert seen == ["outer begins x", "outer leaves at 0"]


def test_work_after_the_watched_block_is_not_watched() -> None:
    seen: list[str] = []
    with progress.watched_by(recorder(seen, "a")):
        pass
    with progress.work("x") as work:
        work.done += 1
    assert seen == []


def test_a_work_says_how_much_is_done_how_fast_and_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("rollout", total=128, unit="samples", began=100.0)
    work.done, work.num_tokens = 32, 5000
    monkeypatch.setattr(progress.time, "monotonic", lambda: 110.0)
    assert str(work) == "rollout: 32 of 128 samples, 500 tokens/s, 30 s left"
    assert str(Work("starting sglang", began=98.0)) == "starting sglang: 12 s"


def test_the_last_look_sees_the_end_of_the_work() -> None:
    work, seen = Work("rollout", total=2), []
    first = threading.Event()

    def look() -> None:
        seen.append(work.done)
        first.set()

    with progress.looked_at(look, every_s=3600):
        assert first.wait(60)
        work.done = 2
    assert seen == [0, 2]
