"""Have the engine awake and serving one adapter."""

from prefect import task

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.engines.base import EngineUnavailable
from infra.measures import measured
from infra.records import AdapterVersion
from tasks.caching import NO_CACHE, only


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=[2, 10], retry_condition_fn=only(EngineUnavailable))
def wake_engine(config: EngineConfig, adapter: AdapterVersion) -> None:
    """Launch or wake the engine with this adapter: golden check and canary included."""
    with measured(adapter.run, adapter.version, "wake"):
        engine = open_engine(config, adapter)
        engine.wake()
        engine.load_adapter(adapter)
