"""Work that is started in a thread before its task runs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import pytest
from prefect import flow

from infra.concurrency.prefetch import Prefetch
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


def test_join_shows_the_progress_of_work_that_started_before() -> None:
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

    def resume_once_watched(work: Work) -> None:
        if work.what == "rollout":
            is_watched.set()

    @contextmanager
    def watch(work: Work) -> Iterator[None]:
        with recorder(seen)(work):
            resume_once_watched(work)
            yield

    with Prefetch() as prefetch:
        before = time.time()
        prefetch.start(HERE, count, 4)
        assert is_half_done.wait(60)
        assert prefetch.is_running
        assert before <= (prefetch.started_at(HERE) or 0.0) <= time.time()
        with progress.watched_by(watch):
            prefetch.join(HERE)
        assert not prefetch.is_running and prefetch.started_at(HERE) is None
    assert seen == ["first at 4", "first ends at 4", "rollout at 2", "rollout ends at 4"]


def test_join_raises_the_error_of_the_work_once() -> None:
    def fail() -> None:
        with progress.work("rollout"):
            raise ZeroDivisionError("no")

    seen: list[str] = []
    with Prefetch() as prefetch:
        prefetch.start(HERE, fail)
        with pytest.raises(ZeroDivisionError, match="no"), progress.watched_by(recorder(seen)):
            prefetch.join(HERE)
        prefetch.join(HERE)
    assert seen == ["rollout at 0", "rollout fails"]


def test_the_work_has_the_context_of_the_block_and_not_that_of_its_start() -> None:
    whose: ContextVar[str] = ContextVar("whose")
    whose.set("the run's")
    found: list[str] = []
    with Prefetch() as prefetch:
        whose.set("the step's")
        prefetch.start(HERE, lambda: found.append(whose.get()))
    assert found == ["the run's"]


def test_two_objects_know_nothing_of_each_other() -> None:
    done: list[int] = []
    with Prefetch() as one, Prefetch() as other:
        one.start(HERE, done.append, 1)
        assert not other.is_running
        other.start(HERE, done.append, 2)
    assert sorted(done) == [1, 2]


def test_a_second_start_in_the_same_folder_changes_nothing() -> None:
    done: list[int] = []
    with Prefetch() as prefetch:
        prefetch.start(HERE, done.append, 1)
        prefetch.start(HERE, done.append, 2)
        prefetch.join(HERE)
    assert done == [1]


@pytest.mark.parametrize("error", [None, ValueError("the block")])
def test_work_that_was_not_joined_ends_with_its_block(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    prefetch = Prefetch()

    def work() -> None:
        time.sleep(0.1)
        done.append(1)
        raise ZeroDivisionError("not joined")

    def block() -> None:
        with prefetch:
            prefetch.start(HERE, work)
            if error:
                raise error

    if error:
        with pytest.raises(ValueError, match="the block"):
            block()
    else:
        block()
    assert done == [1] and not prefetch.is_running
    assert f"work in {HERE} failed, its task will do what is missing: ZeroDivisionError: not joined" in caplog.text


def test_a_cancel_does_not_wait() -> None:
    done: list[int] = []
    may_end, prefetch = threading.Event(), Prefetch()

    def work() -> None:
        assert may_end.wait(60)
        done.append(1)

    with pytest.raises(KeyboardInterrupt), prefetch:
        prefetch.start(HERE, work)
        raise KeyboardInterrupt
    assert prefetch.is_running and not done
    may_end.set()
    prefetch.drain()
    assert done == [1] and not prefetch.is_running


def test_several_pieces_of_work_run_one_at_a_time_in_the_order_of_their_starts() -> None:
    done: list[int] = []
    may_end = threading.Event()

    def work(number: int) -> None:
        assert may_end.wait(60)
        done.append(number)

    with Prefetch() as prefetch:
        for number in (1, 2, 3):
            prefetch.start(HERE / str(number), work, number)
        assert prefetch.started_at(HERE / "1") is not None
        assert prefetch.started_at(HERE / "2") is None
        may_end.set()
        prefetch.join(HERE / "3")
        assert done == [1, 2, 3] and prefetch.is_running, "the first two were not joined"
        prefetch.start(HERE / "1", work, 4)
    assert done == [1, 2, 3]


def test_work_behind_one_that_fails_begins_only_when_it_is_started_again_after_the_error_was_raised() -> None:
    done: list[int] = []
    may_fail = threading.Event()

    def fail() -> None:
        assert may_fail.wait(60)
        raise ZeroDivisionError("no")

    first, second, third = (HERE / name for name in "abc")
    with Prefetch() as prefetch:
        prefetch.start(first, fail)
        prefetch.start(second, done.append, 2)
        may_fail.set()
        while prefetch._calls[first].error is None:
            time.sleep(0.01)
        prefetch.start(third, done.append, 3)
        with pytest.raises(ZeroDivisionError):
            prefetch.join(first)
        prefetch.join(second)
        assert not prefetch.is_running and done == [], "its task works alone now"
        for folder, number in ((second, 2), (third, 3)):
            prefetch.start(folder, done.append, number)
        prefetch.join(third)
    assert done == [2, 3]


def test_work_that_has_not_begun_is_left_when_the_block_ends() -> None:
    done: list[int] = []
    is_first_at_work, may_end, prefetch = threading.Event(), threading.Event(), Prefetch()

    def work() -> None:
        is_first_at_work.set()
        assert may_end.wait(60)
        done.append(1)

    with prefetch:
        prefetch.start(HERE / "1", work)
        prefetch.start(HERE / "2", done.append, 2)
        assert is_first_at_work.wait(60)
        threading.Timer(0.2, may_end.set).start()
    assert done == [1] and not prefetch.is_running


def test_a_flow_that_is_given_one_stores_no_more_than_its_name() -> None:
    @flow(name="takes-one")
    def takes_one(number: int, prefetch: Prefetch | None = None) -> None: ...

    with Prefetch() as prefetch:
        assert takes_one.validate_parameters({"number": 1, "prefetch": prefetch})["prefetch"] is prefetch
        assert takes_one.serialize_parameters({"number": 1, "prefetch": prefetch}) == {"number": 1, "prefetch": "<Prefetch>"}
