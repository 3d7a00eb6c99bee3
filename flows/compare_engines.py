"""Rollout engines under the same RL loop, measured by rules that anybody can check: docs/compare-engines.md.

prefect deployment run compare-engines/local                both engines, mode inference
python -m flows.compare_engines --mode training --num-steps 5      the same in this process; --help lists every option
"""

from prefect import flow

from infra.comparison import kept_blocks
from infra.comparison.config import ComparisonConfig, blocks_of
from infra.ownership import sole_use
from infra.settings import settings
from tasks.begin_comparison import begin_comparison, check_comparison
from tasks.finish_comparison import finish_comparison
from tasks.flow_runs import note_flow_run
from tasks.measure_step import end_engine, measure_step
from tasks.start_engine import start_engine


@flow(name="compare-engines", flow_run_name="{config.name}", result_storage=settings().results, result_serializer="json")
def compare_engines(config: ComparisonConfig = ComparisonConfig()) -> str:  # noqa: B008  # frozen
    """Measure engines; run again after an interruption, it goes on at the engine and step where it stopped.

    Args:
        config: Engines, load and rules.
    """
    note_flow_run()
    check_comparison(config)  # before waiting for anybody
    with sole_use(f"comparison {config.name}"):
        digest = begin_comparison(config)
        for block in blocks_of(config):
            steps_left = start_engine(config, digest, block)
            for step in steps_left:
                if not measure_step(config, digest, block, step):
                    break
            if steps_left or not kept_blocks.is_kept(config, digest, block):  # else what runs is a later block's
                end_engine(config, digest, block)
        return finish_comparison(config, digest)


if __name__ == "__main__":
    from flows.compare_command import main

    main()
