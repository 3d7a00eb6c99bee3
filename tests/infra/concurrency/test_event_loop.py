import asyncio
import contextvars
import os
import signal
import threading

import pytest

from infra.concurrency.event_loop import completed

WHO = contextvars.ContextVar("WHO", default="nobody")


async def asked() -> tuple[str, bool]:
    await asyncio.sleep(0)
    return WHO.get(), threading.current_thread() is threading.main_thread()


async def failing() -> None:
    raise ValueError("as it was raised")


def test_work_is_done_in_the_callers_thread_where_no_loop_runs() -> None:
    assert completed(asked()) == ("nobody", True)


def test_work_is_done_where_a_loop_runs_already_as_in_a_notebook() -> None:
    async def notebook() -> tuple[str, bool]:
        WHO.set("a flow run")
        return completed(asked())

    assert asyncio.run(notebook()) == ("a flow run", False)


def test_errors_come_through_either_way() -> None:
    async def notebook() -> None:
        completed(failing())

    for call in (lambda: completed(failing()), lambda: asyncio.run(notebook())):
        with pytest.raises(ValueError, match="as it was raised"):
            call()


class Ended(BaseException):
    """As Prefect's TerminationSignal is."""


@pytest.mark.parametrize("is_in_task", [True, False])
def test_what_the_handler_of_sigterm_raises_ends_the_work_wherever_the_signal_comes(is_in_task: bool) -> None:
    def handler(number: int, frame: object) -> None:
        raise Ended

    async def strike() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def work() -> None:
        if is_in_task:
            tasks.append(asyncio.create_task(strike()))  # as a server has one for each connection, which is not awaited
        else:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)

    tasks: list[asyncio.Task[None]] = []
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Ended):
            completed(work())
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
