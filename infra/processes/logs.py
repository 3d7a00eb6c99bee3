"""Log files of child programs: one for each attempt, followed while they grow, quoted in errors."""

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_TAIL_LINES = 40
MAX_START_BYTES = 2**20
MAX_TRACEBACK_BYTES = 2**18
"""Length of the end of a log in which a traceback is searched for."""
MAX_TRACEBACK_LINES = 60
TRACEBACK = "Traceback (most recent call last):"
OF_AN_END = (
    "KeyboardInterrupt",
    "SystemExit",
    "asyncio.exceptions.CancelledError",
    "BrokenPipeError",
    "ConnectionResetError",
    "EOFError",
)
"""Errors that a program logs when it or one of its processes is ended from outside."""


def fresh_log(path: Path) -> Path:
    """Return the path of an attempt's log. Logs of earlier attempts are kept as trainer.1.log, trainer.2.log, ..."""
    if path.exists():
        number = 1 + len(list(path.parent.glob(f"{path.stem}.[0-9]*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    return path


def beginning(path: Path) -> str:
    """Return a log's first MAX_START_BYTES, in which a server reports its settings. Empty if there is no log."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        return stream.read(MAX_START_BYTES).decode(errors="replace")


def last_lines(path: Path, count: int = NUM_TAIL_LINES) -> str:
    """Return the end of a log, for an error message; nothing of it where count is 0."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else [f"({path} does not exist)"]
    return "\n".join(lines[max(len(lines) - count, 0) :])


def last_traceback(path: Path) -> str:
    """Return the last Python traceback in a log, from its first line to the error's; only the end of a long one. Empty if there is none, or
    if it only reports that the program was ended."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - MAX_TRACEBACK_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    begin = max((n for n, line in enumerate(lines) if line.endswith(TRACEBACK)), default=None)
    if begin is None:
        return ""
    inside = itertools.takewhile(lambda line: line.startswith(" "), lines[begin + 1 :])
    found = [TRACEBACK, *inside]
    error = next(iter(lines[begin + len(found) : begin + len(found) + 1]), "")
    is_of_an_end = error.startswith(OF_AN_END)
    return "" if is_of_an_end else "\n".join([*found, error][-MAX_TRACEBACK_LINES:])


@contextlib.contextmanager
def followed(path: Path, on_line: Callable[[str], None], poll_s: float = 0.5) -> Iterator[None]:
    """Pass on each line that is appended to a file while the block runs, as soon as the line is complete."""
    done = threading.Event()
    position = path.stat().st_size if path.exists() else 0

    def pass_on(*, is_last: bool) -> None:
        nonlocal position
        if not path.exists():
            return
        with path.open("rb") as stream:
            stream.seek(position)
            appended = stream.read()
        whole = appended if is_last else appended[: appended.rfind(b"\n") + 1]
        position += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            on_line(line)

    def follow() -> None:
        while not done.wait(poll_s):
            pass_on(is_last=False)
        pass_on(is_last=True)

    # in the caller's context: the lines belong to the task that requested them
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)
