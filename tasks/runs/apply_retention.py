"""Free disk space: remove the adapter versions that need not be retained."""

import logging

from prefect import task

from infra.config import RunConfig
from infra.mirror import copying
from infra.runs import evaluations, retention
from infra.runs.lineage import next_step
from infra.tracking import mlflow_store
from tasks.support.caching import NO_CACHE

log = logging.getLogger(__name__)


@task(cache_policy=NO_CACHE)
def apply_retention(config: RunConfig) -> None:
    """Apply the run's retention. Files that the next step needs are retained."""
    if config.retention.keep_last is None:
        return
    delivered, copied = mlflow_store.delivered_adapters(config.name), copying.copied_adapters(config.name)
    before = retention.num_bytes(config.name)
    changed = retention.apply(
        config.retention,
        config.name,
        latest=next_step(config.name),
        best=evaluations.best_steps(config.evaluation, evaluations.of_run(config.name, config.eval_config)),
        delivered=delivered if copied is None else delivered & copied,
    )
    if changed:
        freed = (before - retention.num_bytes(config.name)) / 2**20
        log.info("retention: adapters %s made smaller or removed, %.1f MiB freed", ", ".join(map(str, changed)), freed)
