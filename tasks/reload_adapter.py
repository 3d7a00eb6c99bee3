"""Have the engine serve the newly trained adapter."""

from prefect import task

from infra.concurrency.prefetch import Prefetch
from infra.config import EngineConfig
from infra.engines import open_engine
from infra.records import AdapterVersion
from infra.runs.bad_answers import save_bad_answer
from infra.telemetry import memory_usage
from infra.telemetry.timings import measured
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def reload_adapter(config: EngineConfig, trained: AdapterVersion, prefetch: Prefetch | None = None) -> None:
    """Resume the engine, load the new adapter under its own name and unload the old one, golden check and canary included. An engine that
    samples for later steps with older adapters is left alone: the first rollout of the new adapter loads it, with the same checks.

    prefetch: May have those rollouts.
    """
    if prefetch is not None and prefetch.is_running:
        return
    place = (trained.run, trained.version - 1)
    with measured(*place, "reload") as figures, save_bad_answer(*place, "reload"):
        engine = open_engine(config, trained)
        engine.wake()
        engine.load_adapter(trained)
        figures["kv_cache_tokens"] = engine.kv_cache_tokens
        memory_usage.note(*place, "after_wake")
