"""Run asynchronous work from synchronous code, also where the caller has an event loop of its own, as notebooks have."""

import asyncio
import contextvars
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def completed(work: Coroutine[Any, Any, T]) -> T:
    """What it comes to; blocks until then."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    with ThreadPoolExecutor(1) as thread:  # a thread can have a second loop, the context says whose log lines these are
        return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run the work to its end, or to that of SIGTERM: what its handler raises is raised here.

    Where it raises is where the signal came: in a task or a callback, and the loop would keep it there.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    raised: list[BaseException] = []

    async def until_ended() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:  # noqa: BLE001  # raised below
                raised.append(error)
                loop.call_soon_threadsafe(task.cancel)

        signal.signal(signal.SIGTERM, end)
        try:
            return await work
        finally:
            signal.signal(signal.SIGTERM, handler)

    try:
        found = asyncio.run(until_ended())
    except BaseException as error:
        if raised:
            raise raised[0] from error
        raise
    if raised:
        raise raised[0]
    return found
