"""Wake the engine and have it serve one adapter."""

from prefect import task

from infra.concurrency.prefetch import Prefetch
from infra.config import EngineConfig
from infra.engines import open_engine
from infra.records import AdapterVersion
from infra.runs.bad_answers import save_bad_answer
from infra.telemetry.timings import measured
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def wake_engine(config: EngineConfig, adapter: AdapterVersion, prefetch: Prefetch | None = None) -> None:
    """Launch or wake the engine with this adapter, golden check and canary included. An engine that already runs this step's rollout, or a later
    one, is left alone.

    prefetch: May have those rollouts.
    """
    place = (adapter.run, adapter.version)
    with measured(*place, "wake") as figures, save_bad_answer(*place, "wake"):
        engine = open_engine(config, adapter)
        if prefetch is None or not prefetch.is_running:
            engine.wake()
            engine.load_adapter(adapter)
            figures |= {f"start_{name}": value for name, value in engine.start_figures().items()}
        figures["kv_cache_tokens"] = engine.kv_cache_tokens
