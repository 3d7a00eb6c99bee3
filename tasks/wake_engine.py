"""Have the engine awake and serving one adapter."""

from prefect import task

from infra import early
from infra.config import EngineConfig
from infra.engines import open_engine, server
from infra.evidence import evidence_kept
from infra.files import step_folder
from infra.measures import measured
from infra.records import AdapterVersion, Step
from tasks.caching import NO_CACHE
from tasks.retrying import BACKOFF, MAX_RETRIES, worth_another_try


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def wake_engine(config: EngineConfig, adapter: AdapterVersion) -> None:
    """Launch or wake the engine with this adapter: golden check and canary included. An engine that is at this step's rollout already is left
    to it."""
    place = (adapter.run, adapter.version)
    with measured(*place, "wake") as figures, evidence_kept(*place, "wake"):
        if not early.is_under_way(step_folder(Step(run=adapter.run, index=adapter.version, seed=adapter.seed))):
            engine = open_engine(config, adapter)
            engine.wake()
            engine.load_adapter(adapter)
        figures["kv_cache_tokens"] = server.kv_cache_tokens()
