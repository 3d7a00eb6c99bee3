"""Variants of a run, one after the other on this machine; those that differ after sampling only share the rollouts of step 0.

ratchet sweep --preset arithmetic --name rates --over trainer.learning_rate=1e-4,3e-4,1e-3 --over seed=0,1
prefect deployment run rl-sweep/local -p 'over=["trainer.learning_rate=1e-4,3e-4"]' -p name=rates

Run the same again to resume: finished work is reused.
"""

from collections.abc import Sequence

from prefect import flow
from prefect.client.schemas.objects import State

from flows.evaluate import evaluate
from flows.parameters import CHANGES, NAME, NUM_STEPS, PRESET, RunChanges, resolved
from flows.replay import replay_step
from flows.run import rl_run
from infra.config import RunConfig
from infra.eval_records import RunReport
from infra.processes.gpu_lock import gpu_lock
from infra.runs.evaluations import due_sets
from tasks.support.flow_runs import note_flow_run
from tasks.sweeps.begin_sweep import Sharing, check_sweep, misses_first_evaluation, shared_step


class VariantsFailed(RuntimeError):
    """Some variants of a sweep were not finished; the others were."""


@flow(name="rl-variant", result_serializer="json")
def rl_variant(config: RunConfig, shared: Sharing | None) -> RunReport:
    """Make one variant's run.

    Args:
        config: The variant.
        shared: The step 0 that it takes over; left out, it samples its own or has it already.
    """
    note_flow_run(config.name, config)
    if shared:
        replay_step(shared.donor, 0, config.name, shared.from_task, list(shared.overrides))
    if misses_first_evaluation(config):
        evaluate(config, 0, sets=due_sets(config.evaluation, 0, config.num_steps))
    return rl_run(config)


@flow(name="rl-sweep", result_serializer="json")
def rl_sweep(
    config: RunChanges = CHANGES,
    over: list[str] = ["trainer.learning_rate=7e-4,1.5e-3,3e-3"],  # noqa: B006  # read only
    preset: str = PRESET,
    name: str = NAME,
    num_steps: int = NUM_STEPS,
) -> list[RunReport]:
    """Make a run for each combination of some fields' values, one after the other.

    Args:
        config: Fields that differ from the preset in all variants, by section; or a whole configuration.
        over: Fields with their values, such as trainer.learning_rate=1e-4,3e-4; all combinations are made.
        preset: Configuration to start from. auto: that of the run `name`, if there is one, else arithmetic.
        name: Name of the sweep, which begins those of its runs. Empty: the preset's.
        num_steps: RL steps of each run. 0: as many as the preset has.
    """
    config = resolved(config, preset, name, num_steps)
    note_flow_run(config.name, config)
    variants = check_sweep(config, over)  # before waiting for anybody
    with gpu_lock(f"sweep {config.name}"):
        made = [rl_variant(variant, shared_step(variant, variants), return_state=True) for variant in variants]
    return reports_of(variants, made)


def reports_of(variants: Sequence[RunConfig], made: Sequence[State[RunReport]]) -> list[RunReport]:
    """Raises VariantsFailed, naming them, where some are not finished."""
    failed = {variant.name: state for variant, state in zip(variants, made, strict=True) if not state.is_completed()}
    if failed:
        said = "; ".join(f"{name}: {state.message}" for name, state in failed.items())
        raise VariantsFailed(f"{len(failed)} of {len(variants)} variants are not finished, run the same again for them: {said}")
    return [state.result() for state in made]
