"""Have the engine release memory for the trainer."""

import logging

from prefect import task

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.records import AdapterVersion
from infra.telemetry import memory_usage
from infra.telemetry.timings import measured
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def release_memory(config: EngineConfig, adapter: AdapterVersion) -> None:
    """Carry out the colocation plan. Returns when NVML reports that the memory is free."""
    with measured(adapter.run, adapter.version, "release") as figures:
        engine = open_engine(config, adapter)
        release = engine.release_memory()
        memory_usage.note(adapter.run, adapter.version, "after_release")
        log.info("colocation plan %s (%s): %d bytes released", release.plan, release.reason, release.released_bytes)
        figures |= {"released_bytes": release.released_bytes, "memory_gib": engine.memory_in_use_gib()}
