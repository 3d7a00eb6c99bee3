"""Have the engine serve the adapter that was just trained."""

from prefect import task

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.engines.base import EngineUnavailable
from infra.measures import measured
from infra.records import AdapterVersion
from tasks.caching import NO_CACHE, only


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=[2, 10], retry_condition_fn=only(EngineUnavailable))
def reload_adapter(config: EngineConfig, trained: AdapterVersion) -> None:
    """Resume the engine, load the new adapter under its own name, unload the old one; golden check and canary included."""
    with measured(trained.run, trained.version - 1, "reload"):
        engine = open_engine(config, trained)
        engine.wake()
        engine.load_adapter(trained)
