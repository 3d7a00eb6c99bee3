"""Requests that do not depend on one another's answers, sent concurrently: a few of them take as long as one."""

import contextvars
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

# Perf: 0.04 s between a rollout's last token and the next question (7B, H200, docs/history/log.md).
TURN_S = 0.0005
"""Seconds for which a thread may keep Python's lock when another one wants it. By Python's 5 ms, a thread with an answer to take and three more
lines to run before the next question waits as often for the thread that works: an engine was asked once more 40 ms too late after a rollout's
last token (docs/history/log.md, 2026-11-22)."""

P = ParamSpec("P")
T = TypeVar("T")


class Submit(Protocol):
    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]": ...


@contextmanager
def run_concurrently(num_threads: int) -> Iterator[Submit]:
    """Gives what begins a call beside the others; all of them are over when the block is, however it ends. The caller sees an error
    where it asks for that call's result. With one thread they are made one after the other, in their order.

    A call has its caller's context: whose log lines these are, and whether its seconds are counted already. Threads take turns of TURN_S
    from then on, in the whole process.
    """
    sys.setswitchinterval(TURN_S)
    with ThreadPoolExecutor(num_threads) as threads:

        def submit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
            context = contextvars.copy_context()
            return threads.submit(lambda: context.run(function, *args, **kwargs))

        yield submit


@contextmanager
def in_background(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
    """Call the function while the block runs; both are over when it ends. The call's error is raised then; if both fail, it is raised from
    the block's error."""
    with run_concurrently(1) as submit:
        call = submit(function, *args, **kwargs)
        try:
            yield
        except Exception as error:
            if (other := call.exception()) is not None:
                raise other from error
            raise
    call.result()
