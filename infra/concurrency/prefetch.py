"""Prefetching: start a task's work in a background thread before the task itself runs.

with Prefetch() as prefetch:    start(folder) --thread--> join(folder)    join shows the work's progress from its caller and raises its error

Several pieces of work form a queue: one runs at a time, in the order of their starts. If one fails, those behind it do not begin: its task
repeats it, and must be alone with what they share.
"""

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self

from pydantic_core import CoreSchema, core_schema

from infra.progress import work as progress
from infra.progress.work import Work

log = logging.getLogger(__name__)

P = ParamSpec("P")


class _Call:
    """A piece of work in a thread of its own."""

    def __init__(self, context: Context, do: Callable[[], object], before: "_Call | None" = None) -> None:
        """before: What must have ended first; None: it begins at once."""
        self.began_at = None if before else time.time()
        self.error: Exception | None = None
        self.is_left = False
        """It will not begin: what came before it failed, or nothing more is wanted."""
        self._before, self._beginning = before, threading.Lock()
        self._parts: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=context.copy().run, args=(self._run, do), daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Do not begin it, unless it has begun."""
        with self._beginning:
            self.is_left = self.began_at is None

    def watch(self) -> None:
        """Show its progress until it ends, however it ends."""
        for work, end in iter(self._parts.get, None):
            with suppress(Exception), progress.shown(work):
                end.result()
        self._thread.join()

    def _run(self, do: Callable[[], object]) -> None:
        try:
            if self._begins():
                with progress.watched_by(self._note):
                    do()
        except Exception as error:  # noqa: BLE001  # raised by join
            self.error = error
        finally:
            self._parts.put(None)

    def _begins(self) -> bool:
        """Wait for its turn. Returns whether it comes."""
        before, self._before = self._before, None
        if before is not None:
            before._thread.join()
            if before.error or before.is_left:
                self.leave()
        with self._beginning:
            if not self.is_left:
                self.began_at = self.began_at or time.time()
            return not self.is_left

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


# Perf: last training kernel to the next rollout 1.8 to 2.0 -> 0.16 to 0.28 s (CPU, scripted engine, docs/history/log.md).
class Prefetch:
    """Work that was started and not joined, by the folder that it works in.

    Log lines of the work belong to the context that made this object. When the block of this object ends or fails, it waits for work that has
    begun and was not joined, and an error of that work becomes a warning. After a cancel (KeyboardInterrupt) it does not wait.
    """

    __slots__ = (
        "_calls",
        "_context",
        "is_ending",
    )  # without __dict__: Prefect stores a parameter's name alone where it cannot take the value apart

    def __init__(self) -> None:
        self._calls: dict[Path, _Call] = {}
        self._context = contextvars.copy_context()
        self.is_ending = False
        """Whether it waits for work that no task has joined: that work may end early."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> CoreSchema:
        return core_schema.is_instance_schema(cls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.drain()

    def start(self, folder: Path, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call function in a thread when all that was started before has ended. What was started in this folder already continues instead.
        After an error nothing more is started until its task has joined it."""
        self._calls = {known: call for known, call in self._calls.items() if not call.is_left}
        if folder in self._calls or any(call.error for call in self._calls.values()):
            return
        before = next(reversed(self._calls.values()), None)
        self._calls[folder] = _Call(self._context, lambda: function(*args, **kwargs), before)

    @property
    def is_running(self) -> bool:
        """Whether any work was started and not joined yet."""
        return any(not call.is_left for call in self._calls.values())

    def started_at(self, folder: Path) -> float | None:
        """Return when the work in this folder began, in seconds since the epoch; None where none has begun."""
        return self._calls[folder].began_at if folder in self._calls else None

    def join(self, folder: Path) -> None:
        """Wait for the work in this folder, if any, and raise its error. A second call finds nothing: its caller does the work itself."""
        if folder in self._calls and (error := self._ended(folder)):
            self._leave_what_waits()
            raise error

    def drain(self) -> None:
        """Wait for the work that has begun and was not joined, and leave the rest. An error becomes a warning, since the task that needs the work
        does what is missing."""
        self._leave_what_waits()
        self.is_ending = True
        for folder in list(self._calls):
            if error := self._ended(folder):
                text = f"{type(error).__name__}: {error}"
                log.warning(
                    "the prefetched work in %s failed, its task will do what is missing: %s", folder, text, exc_info=error
                )
        self.is_ending = False

    def _leave_what_waits(self) -> None:
        for call in self._calls.values():
            call.leave()

    def _ended(self, folder: Path) -> Exception | None:
        """Wait for the work and return its error."""
        self._calls[folder].watch()
        return self._calls.pop(folder).error
