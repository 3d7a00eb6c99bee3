"""Start one engine of a comparison, check it and warm it up. The time of its first start in the round is recorded."""

import logging

from prefect import task

from infra.comparison.config import Block, ComparisonConfig
from infra.comparison.measurement.load import adapter_of
from infra.comparison.measurement.measures import PASSED, StepMeasures
from infra.comparison.measurement.measuring import ensure_started, open_backend
from infra.comparison.paths import block_folder, step_path
from infra.comparison.results import START, keep_log, read_start, read_step
from infra.failures import WrongAnswer
from infra.store.files import write_json
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)


def num_made(config: ComparisonConfig, digest: str, block: Block) -> int:
    """Number of steps of a block that are already made, by this process or an interrupted one."""
    for step in range(config.num_steps):
        made = read_step(step_path(digest, block, step))
        if made is None:
            return step
        if made.golden != PASSED:
            break
    return config.num_steps


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def start_engine(config: ComparisonConfig, digest: str, block: Block) -> list[int]:
    """Block -> its remaining steps. An engine that fails its checks has none."""
    block = Block(*block)
    step, folder = num_made(config, digest, block), block_folder(digest, block)
    if step < config.num_steps:
        before, adapter = read_start(folder), adapter_of(config, digest, step)
        engine = open_backend(config, block.backend, adapter)
        try:
            started = ensure_started(engine, config, block, adapter, before)
        except WrongAnswer as error:
            log.error("%s: %s", block.name, error)
            engine.stop()
            failed = StepMeasures(backend=block.backend, round=block.round, step=step, golden=str(error), errors=(str(error),))
            write_json(step_path(digest, block, step), failed.model_dump(mode="json"))
            return []
        finally:
            keep_log(digest, block)
        write_json(folder / START, started.model_dump(mode="json"))
        log.info("%s is up: %s, %d tokens of KV cache", block.name, started.version, started.kv_pool_tokens)
    return list(range(step, config.num_steps))
