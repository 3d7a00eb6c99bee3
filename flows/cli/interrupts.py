"""Ctrl-C, SIGTERM and a closed terminal end a command with one line and exit code 130, 143 or 129; a second Ctrl-C ends it at once.

Imports nothing that takes time: the package `flows` installs it before all other imports of a command.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; what `kill`, `timeout`, service managers and schedulers send; a closed terminal. The exit code is 128 more."""
_come = 0
"""The first one that came; 0: none."""
_line: Callable[[], str] = lambda: "interrupted before anything was started"  # noqa: E731


def say(line: Callable[[], str]) -> None:
    """Give the line that stands for a signal from now on: what was stopped, what goes on, what is kept, and the command for it."""
    global _line
    _line = line


def has_come() -> bool:
    return bool(_come)


def install() -> None:
    """Have a signal while modules are imported end in one line too, and a second Ctrl-C end the process at once."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, take)
    sys.excepthook = _on_error


def in_flows() -> None:
    """Have flows of this process keep these handlers: for the time of a flow Prefect takes SIGTERM for itself, and calls it a crash."""
    from prefect.utilities import engine

    engine._prefect_sigterm_handler = take  # type: ignore[assignment]


def run(main: Callable[[], None]) -> None:
    """Run a command's main function. An error after a signal is one of the work that was cut short: the command ends as interrupted."""
    try:
        main()
    except BaseException:
        if _come:
            _end()
        raise


def take(number: int, frame: FrameType | None) -> None:
    """End the command: the handler of all its signals. `timeout` and closed terminals send theirs twice: more of them change nothing."""
    global _come
    if _come and number != signal.SIGINT:
        return
    _come = _come or number
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _on_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt) and _come:
        _end()
    sys.__excepthook__(kind, error, traceback)


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(f"\n{_line()}\n")
    sys.stderr.flush()
    os._exit(
        128 + _come
    )  # what the blocks of the command had to end is ended; threads that still send log lines are not waited for
