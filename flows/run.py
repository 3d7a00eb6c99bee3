"""A training run: steps from the last committed one on, evaluations between them, and the model that it leaves behind.

prefect deployment run rl-run/local                            goes on with the run `arithmetic`
prefect deployment run rl-run/local -p preset=smoke -p name=mine -p num_steps=4
ratchet run --preset arithmetic --num_steps 20                 the same in this terminal; --help lists every field
"""

from functools import partial

from prefect import flow

from flows.evaluate import evaluate
from flows.parameters import CHANGES, NAME, NUM_STEPS, PRESET, RunChanges, resolved
from flows.step import rl_step
from infra.concurrency.prefetch import Prefetch
from infra.eval_records import RunReport
from infra.processes.gpu_lock import gpu_lock
from infra.runs.evaluations import due_sets
from tasks.runs.apply_retention import apply_retention
from tasks.runs.begin_run import begin_run, is_over
from tasks.runs.finish_run import finish_run
from tasks.support.flow_runs import note_flow_run
from tasks.support.planning.layout import laid_out, note_plan
from tasks.support.preflight import check_run


@flow(name="rl-run", result_serializer="json")
def rl_run(config: RunChanges = CHANGES, preset: str = PRESET, name: str = NAME, num_steps: int = NUM_STEPS) -> RunReport:
    """Make a run's steps, or those that are left of them.

    Args:
        config: Fields that differ from the preset, by section; or a whole configuration.
        preset: Configuration to start from. auto: that of the run `name`, if there is one, else arithmetic.
        name: Name of the run: 1 to 80 letters, digits, '.', '_' or '-'. Empty: the preset's. A run of this name goes on.
        num_steps: RL steps of the whole run. 0: as many as the preset has.
    """
    config, layout = laid_out(resolved(config, preset, name, num_steps))
    note_flow_run(config.name, config)
    with gpu_lock(f"run {config.name}", preflight=partial(check_run, config)), Prefetch() as prefetch:
        num_committed = begin_run(config)
        note_plan(config, layout)
        for version in range(num_committed, config.num_steps + 1):  # step k starts from adapter version k
            if due := due_sets(config.evaluation, version, config.num_steps):
                prefetch.drain()  # the engine is the evaluation's
                evaluate(config, version, sets=due)
            if is_over(config, version):
                break
            rl_step(config, version, prefetch)
            apply_retention(config)
        return finish_run(config)
