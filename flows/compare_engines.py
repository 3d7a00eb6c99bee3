"""Rollout engines under the same RL loop, measured by rules that anybody can check: docs/compare-engines.md.

prefect deployment run compare-engines/local                both engines, mode inference
ratchet compare-engines --mode training --num_steps 5       the same in this terminal; --help lists every option
"""

from prefect import flow

from flows.parameters import CHANGES, NAME, NUM_STEPS, ComparisonChanges, resolved_comparison
from infra.comparison.config import blocks_of
from infra.comparison.measurement import reused_blocks
from infra.processes.gpu_lock import gpu_lock
from tasks.comparisons.begin_comparison import begin_comparison, check_comparison
from tasks.comparisons.finish_comparison import finish_comparison
from tasks.comparisons.measure_step import end_engine, measure_step
from tasks.comparisons.start_engine import start_engine
from tasks.support.flow_runs import note_flow_run


@flow(name="compare-engines", result_serializer="json")
def compare_engines(config: ComparisonChanges = CHANGES, name: str = NAME, num_steps: int = NUM_STEPS) -> str:
    """Measure engines; run again after an interruption, it goes on at the engine and step where it stopped.

    Args:
        config: Fields that differ from the defaults (engines, load and rules); or a whole configuration.
        name: Name of the comparison and of its MLflow runs. Empty: comparison.
        num_steps: RL steps of each engine in each round. 0: 3.
    """
    config = resolved_comparison(config, name, num_steps)
    note_flow_run(config.name)
    check_comparison(config)  # before waiting for anybody
    with gpu_lock(f"comparison {config.name}"):
        digest = begin_comparison(config)
        for block in blocks_of(config):
            steps_left = start_engine(config, digest, block)
            for step in steps_left:
                if not measure_step(config, digest, block, step):
                    break
            if steps_left or not reused_blocks.is_kept(config, digest, block):  # else what runs is a later block's
                end_engine(config, digest, block)
        return finish_comparison(config, digest)
