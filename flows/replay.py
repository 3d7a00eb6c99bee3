"""A step of one run once more, from any of its tasks on, as the first step of a new run.

prefect deployment run replay-step/local -p run=smoke -p step=0 -p name=again -p from_task=train
ratchet replay smoke 0 --name slower --from train --trainer.learning_rate 1e-5
"""

from functools import partial
from typing import Annotated

from prefect import flow
from pydantic import WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from flows.drawing import draw_samples, have_judged, released
from flows.parameters import CHANGES, RunChanges, as_overrides
from infra.colocation.plans import resolve_colocation
from infra.concurrency.deadline import Deadline
from infra.config import NameInForm
from infra.processes.gpu_lock import gpu_lock
from infra.records import StepReport
from infra.reporting.names import replay_name
from infra.runs.replay import TaskName
from infra.telemetry.system_metrics import record_system_metrics
from tasks.assemble import assemble
from tasks.commit_step import commit_step
from tasks.reload_adapter import reload_adapter
from tasks.replays.begin_replay import begin_replay, plan_replay
from tasks.replays.compare_digests import compare_digests
from tasks.rewards.by_judge_server import start_judge
from tasks.roll_out import roll_out
from tasks.score import score
from tasks.support.flow_runs import note_flow_run
from tasks.support.progress_artifacts import progress_artifacts
from tasks.train import train
from tasks.wake_engine import wake_engine

StepToReplay = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]


@flow(name="replay-step", result_serializer="json")
def replay_step(
    run: NameInForm,
    step: StepToReplay,
    name: NameInForm,
    from_task: TaskName = "train",
    overrides: SkipJsonSchema[list[str]] = [],  # noqa: B006  # read only; no field of the form, which has `config`
    allow_difference: bool = False,
    config: RunChanges = CHANGES,
) -> StepReport:
    """Replay a committed step; what lies before from_task is taken from it as it is. rl-step can go on with the new run.

    Args:
        run: Name of the run to take the step from.
        step: Number of the step, from 0.
        name: Name of the new run: 1 to 80 letters, digits, '.', '_' or '-'.
        from_task: The first task to run again; the engine is needed for draw_prompts and roll_out only.
        overrides: Changes of the configuration as text, such as trainer.learning_rate=1e-4.
        allow_difference: Keep the step even if nothing was changed and it did not come out the same.
        config: Changes of the configuration, by section.
    """
    overrides = [*overrides, *as_overrides(config)]
    note_flow_run(replay_name(name, step, run))
    preflight = partial(plan_replay, run, step, from_task, name, overrides)
    with gpu_lock(f"run {name}", preflight), progress_artifacts(), record_system_metrics():
        config, now, adapter, kept = begin_replay(run, step, from_task, name, overrides)
        note_flow_run(replay_name(name, step, run), config)
        engine, trainer, plan = resolve_colocation(config)
        needs_engine = kept.rollouts is None
        if kept.prompts is None:
            prompts, rollouts, scored = draw_samples(config, engine, now, adapter)
        else:
            prompts = kept.prompts
            if needs_engine:
                start_judge(engine, config.reward, adapter)
                wake_engine(engine, adapter)
            rollouts = kept.rollouts or roll_out(engine, config.sampling, prompts, adapter, environment=config.played)
            deadline = Deadline(config.reward.task_timeout_s).begin()
            if kept.scored is None:
                have_judged(engine, config.reward, rollouts, prompts, adapter, deadline)
            with released(engine, config.reward, adapter):
                scored = kept.scored or score(config.reward, rollouts, prompts, deadline)
        batch = kept.batch or assemble(config.batch, scored)
        trained = train(trainer, batch, adapter)
        if needs_engine:
            reload_adapter(engine, trained)
        compare_digests(config, adapter, prompts, rollouts, scored, batch, trained, allow_difference)
        return commit_step(config, plan, adapter, prompts, rollouts, scored, batch, trained)
