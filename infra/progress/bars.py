"""Progress for a person: one display with a row for each piece of work if stdout is a terminal, else an occasional log line."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from infra.progress.brief import brief
from infra.progress.work import Work, looked_at

LINE_EVERY_S = 60.0
"""Work that ends within this time has no line."""
LINES_IN_ALL = 20
"""Most lines of one piece of work: each is a row in Prefect's store. Work without a known total logs less and less often."""
LOOK_EVERY_S = 0.2


@contextmanager
def shown(work: Work) -> Iterator[None]:
    """A watcher: see infra.progress.work."""
    console = Console()
    if not console.is_terminal:
        with as_lines(work):
            yield
        return
    if work.has_bar:
        yield
        return
    with DISPLAY.open(console) as bar:
        row = Bar(work, bar)
        try:
            with looked_at(row.look, LOOK_EVERY_S):
                yield
        finally:
            row.remove()


@contextmanager
def as_lines(work: Work) -> Iterator[None]:
    """A watcher that writes log lines, terminal or not."""
    with looked_at(Lines(work).look, LINE_EVERY_S / 10):
        yield


class Lines:
    """Log lines: at most one every LINE_EVERY_S, and one for each twentieth."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.wait_s = LINE_EVERY_S
        self.next_at = time.monotonic() + LINE_EVERY_S
        self.said: tuple[str, float] = ("", -1.0)

    def look(self) -> None:
        now, fraction = time.monotonic(), self.work.fraction
        if now < self.next_at or self.work.fraction == 1:
            return
        if fraction is not None and self.said[0] == self.work.what and fraction - self.said[1] < 1 / LINES_IN_ALL:
            return
        brief.info("%s", str(self.work))  # as it is now: a handler may format it later
        self.said = (self.work.what, fraction or 0.0)
        self.wait_s *= 1.0 if fraction is not None else 1.5
        self.next_at = now + self.wait_s


class Bar:
    def __init__(self, work: Work, bar: Progress) -> None:
        self.work, self.bar = work, bar
        self.task = bar.add_task(work.what, total=work.total, how="")

    def look(self) -> None:
        what, _, how = str(self.work).partition(": ")
        if self.task in self.bar.task_ids:
            self.bar.update(self.task, description=what, total=self.work.total, completed=self.work.done, how=how)

    def remove(self) -> None:
        self.bar.remove_task(self.task)


class Display:
    """The progress display of this process. It appears with the first piece of work and disappears with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._bar: Progress | None = None
        self._stack = ExitStack()

    @contextmanager
    def open(self, console: Console) -> Iterator[Progress]:
        """Yield the display, for one more piece of work.

        console: Used if none is open.
        """
        with self._lock:
            if self._bar is None:
                self._bar = self._stack.enter_context(_bar(console))
            self._num_open += 1
            bar = self._bar
        try:
            yield bar
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._bar = None
                    self._stack.close()


DISPLAY = Display()


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    """A display that disappears when the work ends. Log lines appear above it in the meantime."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[how]}"),
    )
    bar = Progress(*columns, console=console, transient=True)
    with bar, _logged_above(console):
        yield bar


@contextmanager
def _logged_above(console: Console) -> Iterator[None]:
    """Print log lines above the bar. Log handlers hold the streams of their creation, so rich's own redirection misses them."""
    streams = (sys.__stdout__, sys.__stderr__)
    moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
    for handler in _stream_handlers():
        if handler.stream in streams:
            moved.append((handler, handler.stream))
            _point(handler, cast(TextIO, FileProxy(console, handler.stream)))
    try:
        yield
    finally:
        for handler, stream in moved:
            _point(handler, stream)


def _stream_handlers() -> list["logging.StreamHandler[TextIO]"]:
    known = [
        logging.getLogger(),
        *(each for each in list(logging.root.manager.loggerDict.values()) if isinstance(each, logging.Logger)),
    ]
    handlers = {id(handler): handler for logger in known for handler in logger.handlers}
    return [handler for handler in handlers.values() if isinstance(handler, logging.StreamHandler)]


def _point(handler: "logging.StreamHandler[TextIO]", stream: TextIO) -> None:
    handler.setStream(stream)
    own = getattr(handler, "console", None)  # Prefect's handler has its own console
    if isinstance(own, Console):
        own.file = stream
