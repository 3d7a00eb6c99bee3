"""Have the engine awake and serving one adapter."""

from prefect import task

from infra.concurrency import prefetch
from infra.config import EngineConfig
from infra.engines import open_engine
from infra.records import AdapterVersion, Step
from infra.runs.bad_answers import evidence_kept
from infra.store.files import step_folder
from infra.telemetry.timings import measured
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def wake_engine(config: EngineConfig, adapter: AdapterVersion) -> None:
    """Launch or wake the engine with this adapter: golden check and canary included. An engine that is at this step's rollout already is left
    to it."""
    place = (adapter.run, adapter.version)
    with measured(*place, "wake") as figures, evidence_kept(*place, "wake"):
        engine = open_engine(config, adapter)
        if not prefetch.is_under_way(step_folder(Step(run=adapter.run, index=adapter.version, seed=adapter.seed))):
            engine.wake()
            engine.load_adapter(adapter)
        figures["kv_cache_tokens"] = engine.kv_cache_tokens
