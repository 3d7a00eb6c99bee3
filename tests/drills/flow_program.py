"""The flow process of a cell: the step as it is, with points to stop at. `python tests/drills/flow_program.py CONFIG.json`.

The points lie between the tasks (`<task>.begin`, `<task>.done`, `step.end`) and in their middle (`<task>.middle`); where a twin says
"I am in the middle" itself, nothing is wrapped here. Times to wait are shortened: a drill does not prove patience.

A worker runs it too: the deployment's entrypoint is `rl_step` of this module.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import carried_cells
import far_cells
import in_flight_cells
import points
from prefect import Task

import flows.drawing
import flows.step
from flows.run import rl_run
from flows.step import rl_step
from infra.config import RunConfig
from infra.settings import settings

SCORING = "roll_out.scoring"


class Middle(NamedTuple):
    """The point lies before the n-th call of a function of ours, in this process."""

    point: str
    module: str
    function: str
    call: int = 1


MIDDLES = (
    Middle("open_step.middle", "infra.runs.opening", "write_json"),
    Middle("draw_prompts.middle", "infra.data.prompt_batch", "write_json_lines"),
    Middle("roll_out.playing", "infra.gateway.session.session", "TurnAnswer", call=8),
    Middle(carried_cells.PLAYING_AHEAD, "infra.gateway.session.session", "TurnAnswer", call=2 * 48 + 24),
    Middle(carried_cells.STOPPING, "tasks.support.episode_rollout", "write_json_lines"),
    Middle(carried_cells.MARKING, "tasks.support.episode_rollout", "write_json"),
    Middle("roll_out.publish", "tasks.support.rollout", "write_json"),
    Middle(far_cells.WRITING, "tasks.support.rollout", "write_samples", call=2),
    Middle(far_cells.MARKING, "tasks.support.rollout", "write_json", call=2),
    Middle(SCORING, "infra.rewards.client", "Outcome", call=3),
    Middle("score.judging", "infra.rewards.client", "Outcome", call=3),
    Middle("score.paying", "infra.rewards.judges.judging", "Outcome", call=3),
    Middle("score.scoring", "infra.rewards.models.scoring", "_outcome", call=3),
    Middle("ask_judge.asleep", "tasks.rewards.by_judge_server", "open_judge", call=2),
    Middle("score.middle", "tasks.score", "write_samples"),
    Middle("assemble.middle", "tasks.assemble", "write"),
    Middle("release_memory.middle", "tasks.release_memory", "open_engine"),
    Middle("train.publish", "tasks.train", "publish_folder"),
    Middle("commit_step.middle", "tasks.commit_step", "write_json", call=2),
    Middle("commit_step.delivery", "infra.tracking.upload", "start_upload"),
    Middle(in_flight_cells.AWAITING, "tasks.support.rollouts.in_flight", "_awaited"),
    Middle(in_flight_cells.SWITCHED, "tasks.support.rollouts.in_flight", "switched", call=2),
    Middle(in_flight_cells.LOADED, "infra.engines.sampling", "Detokenizer", call=2),
)
REAL_MIDDLES = (
    Middle("wake_engine.middle", "infra.engines.health_checks", "check_base"),
    Middle("roll_out.middle", "infra.engines.server.server_process", "check_status", call=24),
    Middle("reload_adapter.middle", "infra.engines.health_checks", "check_adapter", call=2),
)
"""Where no twin says it."""


def tasks_of_the_step() -> dict[str, ModuleType]:
    """The tasks of a step of one draw, each with the module of the flow that calls it."""
    found = {
        name: module for module in (flows.drawing, flows.step) for name, each in vars(module).items() if isinstance(each, Task)
    }
    del found["gather_draws"], found["ask_engine"], found["ask_judge"]
    return found


def attach_points(*, real: bool) -> None:
    for name, module in tasks_of_the_step().items():
        _attach_to_task(name, module)
    for middle in MIDDLES + (REAL_MIDDLES if real else ()):
        module = importlib.import_module(middle.module)
        setattr(module, middle.function, _stopping(getattr(module, middle.function), middle))
    _hold_rollout()
    if not real:
        _give_canary_of_twin()


def _give_canary_of_twin() -> None:
    """Have the canary of an adapter that judges be what the engine's twin says of it, as that of a trained one is."""
    from twin_engine import logprobs

    def write_canary(folder: Path, out: Path, base: object, sha256: str, *others: object) -> None:
        tokens = [5, 6, 7, 8, 9, 10]
        told = {"tokens": tokens, "base_logprobs": logprobs(tokens, "base"), "adapter_logprobs": logprobs(tokens, sha256)}
        out.write_text(json.dumps(told))

    module = importlib.import_module("infra.runs.foreign_adapters.folders")
    setattr(module, "write_canary", write_canary)  # noqa: B010  # as above


def _hold_rollout() -> None:
    """Have the rollout end after the scoring beside it has begun, where that is struck."""
    module = importlib.import_module("tasks.support.rollout")
    written = module.write_samples

    @functools.wraps(written)
    def held(*args: Any, **kwargs: Any) -> Any:
        points.wait_for(SCORING)
        return written(*args, **kwargs)

    setattr(module, "write_samples", held)  # noqa: B010  # as above


def _attach_to_task(name: str, module: ModuleType) -> None:
    task: Task[..., Any] = getattr(module, name)
    body = task.fn

    @functools.wraps(body)
    def then_done(*args: Any, **kwargs: Any) -> Any:
        result = body(*args, **kwargs)
        _reach(f"{name}.done")  # the work is there, and Prefect does not know it yet
        return result

    @functools.wraps(body)
    def after_begin(*args: Any, **kwargs: Any) -> Any:
        _reach(f"{name}.begin")
        return task(*args, **kwargs)

    task.fn = then_done
    setattr(module, name, after_begin)


def _stopping(function: Callable[..., Any], middle: Middle) -> Callable[..., Any]:
    num_calls = 0

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == middle.call:
            _reach(middle.point)
        return function(*args, **kwargs)

    return wrapped


def _reach(point: str) -> None:
    """Stop at the point, and commit what is asked of the flow process there."""
    points.reach(point)
    match points.ordered("flow"):
        case "exit 1":
            os._exit(1)
        case "out of memory":
            _forget_order()
            points.run_out_of_memory()


def _forget_order() -> None:
    cell = points.folder()
    assert cell
    (cell / "order.json").unlink()


def shorten_waits() -> None:
    """Patience of the product that cannot be configured, cut so that a cell takes seconds."""
    from infra.engines.replicas import assignment
    from infra.engines.server import server_engine, server_process
    from infra.environments import episodes
    from infra.mirror import remote
    from infra.tracking import upload

    waits = (
        (server_engine, "CONTROL_TIMEOUT_S", 3.0),
        (server_process, "PROBE_TIMEOUT_S", 1.0),
        (upload, "FIRST_WAIT_S", 0.5),
        (episodes, "MARGIN_S", 1.0),
        (assignment, "SLOW_MIN_S", 0.5),
        (assignment, "SLOW_MIN_SAMPLES", 4),
        (remote, "CHECK_S", 3.0),
        (remote, "ANSWER_S", 3.0),
    )
    for module, name, seconds in waits:
        assert hasattr(module, name), f"{module.__name__} has no {name} any more"
        setattr(module, name, seconds)
    for name, module in tasks_of_the_step().items():
        task = getattr(module, name)
        if task.retries:
            task.retry_delay_seconds = 0.2


def run(config: RunConfig) -> int:
    """One attempt at the run's next step, or at all of a run of several; gives the exit code."""
    flow = rl_run if points.plan().get("num_steps", 1) > 1 else rl_step
    state = flow.with_options(result_storage=settings().results)(config, return_state=True)  # type: ignore[call-overload]
    points.reach("step.end")
    return 0 if state.is_completed() else 1


def arm() -> None:
    """Once a process, if it belongs to a cell."""
    cell = points.folder()
    if cell is None:
        return
    is_real = json.loads((cell / "plan.json").read_bytes())["is_real"]
    if not is_real:
        shorten_waits()
    attach_points(real=is_real)


def main(config_path: Path) -> int:
    arm()
    return run(RunConfig.model_validate_json(config_path.read_bytes()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
elif os.environ.get("DRILL_WORKER"):
    arm()
