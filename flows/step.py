"""One RL step: adapter k -> adapter k+1.

prefect deployment run rl-step/local        makes the next step of the run `smoke`
ratchet step                                the same in this terminal
"""

from functools import partial
from typing import Annotated

from prefect import flow
from pydantic import WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from flows.drawing import draw_samples
from flows.parameters import CHANGES, NAME, PRESET, RunChanges, resolved
from infra.colocation.plans import resolve_colocation
from infra.concurrency.prefetch import Prefetch
from infra.data.prompt_batch import measured_in
from infra.mirror.under_way import copied_under_way
from infra.processes.gpu_lock import gpu_lock
from infra.records import StepReport
from infra.reporting.names import step_name
from infra.runs.lineage import next_step
from infra.telemetry.system_metrics import record_system_metrics
from infra.trainers import start_early
from tasks.assemble import assemble
from tasks.commit_step import commit_step
from tasks.open_step import open_step
from tasks.reload_adapter import reload_adapter
from tasks.support.flow_runs import note_flow_run
from tasks.support.planning.layout import laid_out, note_plan
from tasks.support.prefetch_rollout import prefetch_next_rollout, rollouts_during_training
from tasks.support.preflight import check_step
from tasks.support.progress_artifacts import progress_artifacts
from tasks.train import train

resolve = partial(resolved, otherwise="smoke")
StepNumber = Annotated[
    int | None,
    WithJsonSchema({"anyOf": [{"type": "null", "title": "next"}, {"type": "integer", "minimum": 0, "title": "number"}]}),
]


@flow(name="rl-step", result_serializer="json")
def rl_step(
    config: RunChanges = CHANGES,
    step: StepNumber = None,
    prefetch: SkipJsonSchema[Prefetch | None] = None,  # no field of the form
    preset: str = PRESET,
    name: str = NAME,
) -> StepReport:
    """Make one step of a run.

    Args:
        config: Fields that differ from the preset, by section; or a whole configuration.
        step: Number of the step to make, from 0; left out, the first one that is not committed.
        prefetch: Given by a run, to start its next rollouts while this step is still being made or written; leave it out.
        preset: Configuration to start from. auto: that of the run `name`, if there is one, else smoke.
        name: Name of the run: 1 to 80 letters, digits, '.', '_' or '-'. Empty: the preset's.
    """
    config, layout = laid_out(resolve(config, preset, name))
    note_flow_run(step_name(config.name, next_step(config.name) if step is None else step), config)
    with (
        gpu_lock(f"run {config.name}", preflight=partial(check_step, config)),
        progress_artifacts(),
        record_system_metrics(),
        copied_under_way(config.name),
    ):
        current, adapter = open_step(config, step, prefetch)
        note_plan(config, layout)
        note_flow_run(step_name(config.name, current.index), config)  # another process may have made steps meanwhile
        engine, trainer, plan = resolve_colocation(config)
        start_early(trainer, adapter)
        prompts, rollouts, scored = draw_samples(config, engine, current, adapter, prefetch)
        batch = assemble(config.batch, scored)
        with rollouts_during_training(config, engine, current, adapter, prefetch):
            trained = train(trainer, batch, adapter)
        reload_adapter(engine, trained, prefetch)
        prefetch_next_rollout(config, engine, current, trained, rollouts, prefetch, measured_in(prompts, scored))
        return commit_step(config, plan, adapter, prompts, rollouts, scored, batch, trained)
