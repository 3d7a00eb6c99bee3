"""Cost of the promises: seconds of checks, digests and manifests, which are spread over many small places, summed by kind.

The sums belong to this process. A step made by several processes has those of the last one.
"""

import functools
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_spent: dict[str, float] = {}
_lock = threading.Lock()
"""Checks run in several threads. Those of the next step may run while a step ends."""
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


def counted(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count the seconds of a function's calls under a kind. A counted call inside another one belongs to the outer one."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_inside.get():
                return function(*args, **kwargs)
            token, begin = _is_inside.set(True), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _is_inside.reset(token)
                with _lock:
                    _spent[kind] = _spent.get(kind, 0.0) + time.perf_counter() - begin

        return timed

    return decorate


def taken() -> dict[str, float]:
    """Return the seconds by kind since the last call. Called once a step."""
    with _lock:
        sums = dict(sorted(_spent.items()))
        _spent.clear()
    return sums
