"""Ctrl-C on a terminal ends a command with one line and exit code 130; a second one ends it at once.

Imports nothing that takes time: the package `flows` installs it before all other imports of a command.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

EXIT_CODE = 130
_has_come = False
_line: Callable[[], str] = lambda: "interrupted before anything was started"  # noqa: E731


def say(line: Callable[[], str]) -> None:
    """Give the line that stands for a Ctrl-C from now on: what was stopped, what goes on, what is kept, and the command for it."""
    global _line
    _line = line


def has_come() -> bool:
    return _has_come


def install() -> None:
    """Have a Ctrl-C while modules are imported end in one line too, and a second one end the process at once."""
    signal.signal(signal.SIGINT, _first)
    sys.excepthook = _on_error


def run(main: Callable[[], None]) -> None:
    """Run a command's main function. An error after a Ctrl-C is one of the work that was cut short: the command ends as interrupted."""
    try:
        main()
    except BaseException:
        if _has_come:
            _end()
        raise


def _first(number: int, frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _on_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, traceback)


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(f"\n{_line()}\n")
    sys.stderr.flush()
    os._exit(
        EXIT_CODE
    )  # what the blocks of the command had to end is ended; threads that still send log lines are not waited for
