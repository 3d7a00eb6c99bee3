import asyncio
import contextvars
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
