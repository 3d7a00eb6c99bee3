"""Work that begins before whoever needs it asks for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.concurrency import prefetch
from infra.progress import work as progress
from infra.progress.work import Work

HERE = Path("a step's folder")


def recorder(seen: list[str]) -> progress.Watcher:
    @contextmanager
    def watch(work: Work) -> Iterator[None]:
        seen.append(f"{work.what} at {work.done:g}")
        try:
            yield
        except ZeroDivisionError:
            seen.append(f"{work.what} fails")
            raise
        seen.append(f"{work.what} ends at {work.done:g}")

    return watch


def test_whoever_needs_it_watches_it_to_its_end_as_if_he_had_begun_it() -> None:
    seen: list[str] = []
    is_half_done, is_watched = threading.Event(), threading.Event()

    def count(total: int) -> None:
        with progress.work("first", total) as work:
            work.done = total
        with progress.work("rollout", total) as work:
            work.done = total / 2
            is_half_done.set()
            assert is_watched.wait(60)
            work.done = total

    def go_on_once_watched(work: Work) -> None:
        if work.what == "rollout":
            is_watched.set()

    @contextmanager
    def watch(work: Work) -> Iterator[None]:
        with recorder(seen)(work):
            go_on_once_watched(work)
            yield

    with prefetch.allowed():
        before = time.time()
        prefetch.begin(HERE, count, 4)
        assert is_half_done.wait(60)
        assert prefetch.is_under_way(HERE)
        assert before <= (prefetch.began_at(HERE) or 0.0) <= time.time()
        with progress.watched_by(watch):
            prefetch.join(HERE)
        assert not prefetch.is_under_way(HERE) and prefetch.began_at(HERE) is None
    assert seen == ["first at 4", "first ends at 4", "rollout at 2", "rollout ends at 4"]


def test_what_it_raises_is_raised_where_it_is_needed_and_once() -> None:
    def fail() -> None:
        with progress.work("rollout"):
            raise ZeroDivisionError("no")

    seen: list[str] = []
    with prefetch.allowed():
        prefetch.begin(HERE, fail)
        with pytest.raises(ZeroDivisionError, match="no"), progress.watched_by(recorder(seen)):
            prefetch.join(HERE)
        prefetch.join(HERE)
    assert seen == ["rollout at 0", "rollout fails"]


def test_it_is_allowed_in_its_block_only_and_not_in_early_work_itself() -> None:
    found: list[bool] = [prefetch.is_allowed()]
    with prefetch.allowed():
        found.append(prefetch.is_allowed())
        prefetch.begin(HERE, lambda: found.append(prefetch.is_allowed()))
        prefetch.join(HERE)
    found.append(prefetch.is_allowed())
    assert found == [False, True, False, False]


def test_what_is_begun_again_where_it_is_under_way_goes_on() -> None:
    done: list[int] = []
    with prefetch.allowed():
        prefetch.begin(HERE, done.append, 1)
        prefetch.begin(HERE, done.append, 2)
        prefetch.join(HERE)
    assert done == [1]


@pytest.mark.parametrize("error", [None, ValueError("the block")])
def test_what_nobody_joined_is_over_when_its_block_is(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work() -> None:
        time.sleep(0.1)
        done.append(1)
        raise ZeroDivisionError("nobody's")

    def block() -> None:
        with prefetch.allowed():
            prefetch.begin(HERE, work)
            if error:
                raise error

    if error:
        with pytest.raises(ValueError, match="the block"):
            block()
    else:
        block()
    assert done == [1] and not prefetch.is_under_way(HERE)
    assert f"what began early in {HERE} failed, and is left to the task that needs it: ZeroDivisionError: nobody's" in caplog.text


def test_a_cancel_waits_for_nothing_and_whoever_comes_next_waits_for_what_was_left_at_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []
    may_end = threading.Event()

    def work() -> None:
        assert may_end.wait(60)
        done.append(1)
        raise ZeroDivisionError("nobody's")

    with pytest.raises(KeyboardInterrupt), prefetch.allowed():
        prefetch.begin(HERE, work)
        raise KeyboardInterrupt
    assert prefetch.is_under_way(HERE) and not done
    may_end.set()
    prefetch.settle()
    assert done == [1] and not prefetch.is_under_way(HERE)
    assert "is left to the task that needs it: ZeroDivisionError" in caplog.text
