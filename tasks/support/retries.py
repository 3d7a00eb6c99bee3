"""Which failed tasks are retried: the table of infra/failures.py as Prefect's retry settings.

    @task(cache_policy=..., retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)

Prefect has a number of retries and waits, but no error classes and no deadline. So the condition decides, and its reason is added to
the error. A retried task must set up what it needs, because Prefect reruns only that task.
"""

import logging
import time
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from infra import failures
from infra.failures import MAX_RETRIES

__all__ = ["BACKOFF", "MAX_RETRIES", "worth_another_try"]

log = logging.getLogger(__name__)

BACKOFF = list(failures.BACKOFF_S)
_TROUBLE: dict[UUID, tuple[float, int]] = {}
"""By task run: the time of its first failure (monotonic seconds), and its number of failures."""


def worth_another_try(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Decide whether to retry, as Prefect's retry condition."""
    error = state.data
    if not isinstance(error, BaseException):
        return False
    first, num_failures = _TROUBLE.get(task_run.id, (time.monotonic(), 0))
    _TROUBLE[task_run.id] = (first, num_failures + 1)
    said = failures.verdict(error, num_attempts=num_failures + 1, trouble_s=time.monotonic() - first)
    log.log(logging.WARNING if said.is_retried else logging.ERROR, "%s: %s; %s", task.name, type(error).__name__, said.text)
    if not said.is_retried:
        del _TROUBLE[task_run.id]
        _append(error, said.text)
    return said.is_retried


def _append(error: BaseException, text: str) -> None:
    """Append text to an error's message: Prefect does not show an error's notes."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}",)
    elif isinstance(error, OSError) and error.strerror:
        if error.filename is not None:  # which it says last
            error.strerror = f"{error.strerror}: {error.filename}"
            del error.filename
        error.strerror = f"{error.strerror}\n{text}"
    else:
        error.add_note(text)
