"""Prefetching: start a task's work in a background thread before the task itself runs.

within allowed():   begin(place) --thread--> join(place)      who needs it watches it to its end as if he had begun it, and meets its error
"""

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from pathlib import Path
from typing import ParamSpec

from infra.progress import work as progress
from infra.progress.work import Work

log = logging.getLogger(__name__)

P = ParamSpec("P")

_allowed_in: ContextVar[Context | None] = ContextVar("early_work_is_allowed_in", default=None)
_calls: dict[Path, "_Call"] = {}
"""Begun and not joined, by the folder that it works in: the process's, since a cancelled flow leaves work behind that the next one has to find."""


class _Call:
    """A piece of early work in a thread of its own."""

    def __init__(self, context: Context, do: Callable[[], object]) -> None:
        self.began_at = time.time()
        self.error: Exception | None = None
        self._parts: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=context.copy().run, args=(self._run, do), daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """Until it is over, however it ends."""
        for work, end in iter(self._parts.get, None):
            with suppress(Exception), progress.shown(work):
                end.result()
        self._thread.join()

    def _run(self, do: Callable[[], object]) -> None:
        try:
            with progress.watched_by(self._note):
                do()
        except Exception as error:  # noqa: BLE001  # raised where the work is needed
            self.error = error
        finally:
            self._parts.put(None)

    @contextmanager
    def _note(self, work: Work) -> Iterator[None]:
        end: Future[None] = Future()
        self._parts.put((work, end))
        try:
            yield
        except BaseException as error:
            end.set_exception(error)
            raise
        end.set_result(None)


@contextmanager
def allowed() -> Iterator[None]:
    """In the block early work may begin; its log lines are of the flow run that opened the block. What was begun and not joined when the block
    ends or fails is waited for, and its error is no more than a warning; after a cancel only the next owner waits (`settle`)."""
    token = _allowed_in.set(contextvars.copy_context())
    try:
        yield
    except Exception:
        _wait_for_all()
        raise
    finally:
        _allowed_in.reset(token)
    _wait_for_all()


def is_allowed() -> bool:
    return _allowed_in.get() is not None


def begin(place: Path, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """place: the folder that it works in; what is under way there already goes on instead."""
    here = _allowed_in.get()
    assert here is not None
    if place not in _calls:
        _calls[place] = _Call(here, lambda: function(*args, **kwargs))


def is_under_way(place: Path) -> bool:
    """Begun, and not joined yet."""
    return place in _calls


def began_at(place: Path) -> float | None:
    """Seconds since the epoch; None where nothing is under way."""
    return _calls[place].began_at if place in _calls else None


def join(place: Path) -> None:
    """Wait for the work that has begun there, if any; raises what it raises. A later caller finds nothing, and does the work itself."""
    if place in _calls and (error := _ended(place)):
        raise error


def settle() -> None:
    """Wait for what cancelled blocks have left at work: for the next owner of the machine in the same process."""
    for place in _calls:
        log.info("waiting for what a cancelled run has left at work in %s", place)
    _wait_for_all()


def _wait_for_all() -> None:
    for place in list(_calls):
        if error := _ended(place):
            said = f"{type(error).__name__}: {error}"
            log.warning("what began early in %s failed, and is left to the task that needs it: %s", place, said, exc_info=error)


def _ended(place: Path) -> Exception | None:
    """What it raised."""
    _calls[place].watch()
    return _calls.pop(place).error
