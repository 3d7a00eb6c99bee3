"""Prefetching: start a task's work in a background thread before the task itself runs.

with Prefetch() as prefetch:    start(folder) --thread--> join(folder)    join shows the work's progress from its caller and raises its error
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

    def __init__(self, context: Context, do: Callable[[], object]) -> None:
        self.began_at = time.time()
        self.error: Exception | None = None
        self._parts: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=context.copy().run, args=(self._run, do), daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """Show its progress until it ends, however it ends."""
        for work, end in iter(self._parts.get, None):
            with suppress(Exception), progress.shown(work):
                end.result()
        self._thread.join()

    def _run(self, do: Callable[[], object]) -> None:
        try:
            with progress.watched_by(self._note):
                do()
        except Exception as error:  # noqa: BLE001  # raised by join
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


# Perf: last training kernel to the next rollout 1.8 to 2.0 -> 0.16 to 0.28 s (CPU, scripted engine, docs/history/log.md).
class Prefetch:
    """Work that was started and not joined, by the folder that it works in.

    Log lines of the work belong to the context that made this object. When the block of this object ends or fails, it waits for work that was
    not joined, and an error of that work becomes a warning. After a cancel (KeyboardInterrupt) it does not wait.
    """

    __slots__ = (
        "_calls",
        "_context",
    )  # without __dict__: Prefect stores a parameter's name alone where it cannot take the value apart

    def __init__(self) -> None:
        self._calls: dict[Path, _Call] = {}
        self._context = contextvars.copy_context()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> CoreSchema:
        return core_schema.is_instance_schema(cls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.drain()

    def start(self, folder: Path, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call function in a thread. What is running in this folder already continues instead."""
        if folder not in self._calls:
            self._calls[folder] = _Call(self._context, lambda: function(*args, **kwargs))

    def is_running(self, folder: Path) -> bool:
        """Whether work in this folder was started and not joined yet."""
        return folder in self._calls

    def started_at(self, folder: Path) -> float | None:
        """Return the start of the work in this folder in seconds since the epoch; None where none is running."""
        return self._calls[folder].began_at if folder in self._calls else None

    def join(self, folder: Path) -> None:
        """Wait for the work in this folder, if any, and raise its error. A second call finds nothing: its caller does the work itself."""
        if folder in self._calls and (error := self._ended(folder)):
            raise error

    def drain(self) -> None:
        """Wait for all work that was not joined; an error becomes a warning, since the task that needs the work does what is missing."""
        for folder in list(self._calls):
            if error := self._ended(folder):
                text = f"{type(error).__name__}: {error}"
                log.warning(
                    "the prefetched work in %s failed, its task will do what is missing: %s", folder, text, exc_info=error
                )

    def _ended(self, folder: Path) -> Exception | None:
        """Wait for the work and return its error."""
        self._calls[folder].watch()
        return self._calls.pop(folder).error
