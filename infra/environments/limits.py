"""A time limit on what a user's code does in this process."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimeOut(Exception):
    """The environment took longer than environment.turn_timeout_s."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise StepTimeOut in the block after this time. What holds the interpreter longer is ended with its process by the pool."""

    def expired(number: int, frame: object) -> None:
        raise StepTimeOut(f"took longer than environment.turn_timeout_s {seconds:g}")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
