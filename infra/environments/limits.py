"""Time limits on what a user's code does in this process."""

import contextvars
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class StepTimeOut(Exception):
    """The environment took longer than environment.turn_timeout_s."""


class ToolTimeOut(BaseException):
    """A tool took longer than environment.tool_timeout_s. No error of Exception's: a tool may catch all of those."""


@contextmanager
def limited(seconds: float, field: str = "turn_timeout_s") -> Iterator[None]:
    """Raise StepTimeOut in the block after this time. What holds the interpreter longer is ended with its process by the pool.

    field: Of the section `environment`, which says this time.
    """
    with _alarm(seconds, StepTimeOut(f"took longer than environment.{field} {seconds:g}")):
        yield


def call_within(seconds: float, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:  # Any: of a user's tool
    """Call a tool and return its result.

    In another thread than the first one no signal can end it: it is left behind there, and its result is not used.

    Raises:
        ToolTimeOut: if it takes longer than this time.
    """
    late = ToolTimeOut(f"took longer than environment.tool_timeout_s {seconds:g}")
    if threading.current_thread() is threading.main_thread():
        with _alarm(seconds, late):
            return function(**arguments)
    ended: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((function(**arguments), None))
        except BaseException as error:  # noqa: BLE001  # raised below
            ended.append((None, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(seconds)
    result, error = ended[0] if ended else (None, late)
    if error is not None:
        raise error
    return result


@contextmanager
def _alarm(seconds: float, error: BaseException) -> Iterator[None]:
    """Raise the error in the block after this time, or that of an outer block whose time ends first."""

    def expired(number: int, frame: object) -> None:
        raise error

    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if left and left <= seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        used = seconds - signal.setitimer(signal.ITIMER_REAL, 0)[0]
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - used, 1e-3))
