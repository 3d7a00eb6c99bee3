"""The table of failures as Prefect's retries: with Prefect itself, because its bookkeeping is what could be wrong."""

import errno

import pytest
from prefect import flow, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed, Failed

from infra import failures
from infra.failures import EngineUnavailable, TrainerLost
from tasks import release_memory, reload_adapter, roll_out, train, wake_engine
from tasks.support import retries
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

TASKS = [wake_engine.wake_engine, roll_out.roll_out, release_memory.release_memory, train.train, reload_adapter.reload_adapter]


def run_with(*errors: Exception | None) -> tuple[State, int]:
    """A task that fails with these, one after the other; its end, and how often it was run."""
    waiting = list(errors)

    @task(retries=MAX_RETRIES, retry_delay_seconds=0.01, retry_condition_fn=worth_another_try)
    def failing() -> None:
        if (error := waiting.pop(0)) is not None:
            raise error

    @flow
    def of_this_test() -> None:
        failing()

    state = of_this_test(return_state=True)
    return state, len(errors) - len(waiting)


@pytest.mark.usefixtures("prefect_server")
def test_prefect_makes_as_many_attempts_as_the_class_has_and_the_error_says_so() -> None:
    state, num_runs = run_with(*(TrainerLost(f"killed {n}") for n in range(9)))
    assert state.is_failed() and num_runs == 3
    assert "killed 2" in (state.message or "")
    assert "failure class: trainer lost" in (state.message or "")
    assert "attempt 3 of 3" in (state.message or "")


@pytest.mark.usefixtures("prefect_server")
def test_a_cured_task_goes_on_and_another_class_meanwhile_has_the_say() -> None:
    state, num_runs = run_with(EngineUnavailable("gone"), EngineUnavailable("gone"), None)
    assert state.is_completed() and num_runs == 3
    state, num_runs = run_with(EngineUnavailable("gone"), ValueError("group_size 0"), None)
    assert state.is_failed() and num_runs == 2
    assert "group_size 0\nfailure class: bad input" in (state.message or "")


@pytest.mark.usefixtures("prefect_server")
def test_no_attempt_is_begun_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "BACKOFF_S", (3600.0,))  # longer than any deadline is left
    state, num_runs = run_with(EngineUnavailable("gone"), None)
    assert state.is_failed() and num_runs == 1
    assert "no time is left" in (state.message or "")


def test_the_clock_of_the_deadline_starts_with_the_first_failure_of_the_same_task_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(retries.time, "monotonic", lambda: now[0])
    runs = [TaskRun.model_construct(id=name) for name in ("a", "b")]

    def is_retried(run: TaskRun, at: float) -> bool:
        now[0] = at
        return worth_another_try(train.train, run, Failed(data=EngineUnavailable("gone")))

    assert is_retried(runs[0], 1000.0)
    assert is_retried(runs[1], 9000.0), "its own first failure"
    assert not is_retried(runs[0], 2795.0), "1795 s and a wait of 10 s"


def test_an_error_that_is_no_plain_message_keeps_its_form() -> None:
    error = ValueError("a value", 3)
    assert not worth_another_try(train.train, TaskRun.model_construct(id="c"), Failed(data=error))
    assert error.args == ("a value", 3)
    assert "bad input" in error.__notes__[0]


@pytest.mark.parametrize(
    ("name", "said"), [(None, "No space left on device"), ("samples.journal", "No space left on device: samples.journal")]
)
def test_an_error_of_the_system_says_its_class_and_its_file(name: str | None, said: str) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", *([name] if name else []))
    assert not worth_another_try(train.train, TaskRun.model_construct(id="e"), Failed(data=error))
    assert str(error).startswith(f"[Errno 28] {said}\nfailure class: disk full; cure: stop; make room")
    assert str(error).endswith("not retried") and isinstance(error, OSError) and error.errno == errno.ENOSPC


def test_a_result_needs_no_other_try() -> None:
    assert not worth_another_try(train.train, TaskRun.model_construct(id="d"), Completed(data=1))


@pytest.mark.parametrize("each", TASKS, ids=lambda each: each.name)
def test_tasks_that_use_engine_or_trainer_follow_the_table(each: object) -> None:
    assert (each.retries, each.retry_delay_seconds) == (MAX_RETRIES, BACKOFF)  # type: ignore[attr-defined]
    assert each.retry_condition_fn is worth_another_try  # type: ignore[attr-defined]
    assert each.retry_jitter_factor is None  # type: ignore[attr-defined]
