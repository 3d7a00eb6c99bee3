"""Have the engine awake and serving one adapter."""

from prefect import task

from infra.config import EngineConfig
from infra.engines import open_engine, server
from infra.evidence import evidence_kept
from infra.measures import measured
from infra.records import AdapterVersion
from tasks.caching import NO_CACHE
from tasks.retrying import BACKOFF, MAX_RETRIES, worth_another_try


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def wake_engine(config: EngineConfig, adapter: AdapterVersion) -> None:
    """Launch or wake the engine with this adapter: golden check and canary included."""
    with measured(adapter.run, adapter.version, "wake") as figures, evidence_kept(adapter.run, adapter.version, "wake"):
        engine = open_engine(config, adapter)
        engine.wake()
        engine.load_adapter(adapter)
        figures["kv_cache_tokens"] = server.kv_cache_tokens()
