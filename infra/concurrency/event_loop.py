"""Run asynchronous work from synchronous code, also where the caller has an event loop of its own, as notebooks have."""

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def completed(work: Coroutine[Any, Any, T]) -> T:
    """What it comes to; blocks until then."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:  # a thread can have a second loop, the context says whose log lines these are
        return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()
