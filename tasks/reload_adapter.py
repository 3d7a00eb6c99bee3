"""Have the engine serve the adapter that was just trained."""

from prefect import task

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.evidence import evidence_kept
from infra.measures import measured
from infra.records import AdapterVersion
from tasks.caching import NO_CACHE
from tasks.retrying import BACKOFF, MAX_RETRIES, worth_another_try


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def reload_adapter(config: EngineConfig, trained: AdapterVersion) -> None:
    """Resume the engine, load the new adapter under its own name, unload the old one; golden check and canary included."""
    with measured(trained.run, trained.version - 1, "reload"), evidence_kept(trained.run, trained.version - 1, "reload"):
        engine = open_engine(config, trained)
        engine.wake()
        engine.load_adapter(trained)
