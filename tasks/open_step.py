"""Open a run at its next step, after the pre-flight check."""

import logging

from prefect import task

from infra.concurrency.prefetch import Prefetch
from infra.config import RunConfig
from infra.records import AdapterVersion, Step
from infra.runs import lineage, replay
from infra.runs.foreign_adapters import judge_adapter
from infra.runs.lineage import adapter_at
from infra.runs.opening import check_base, start_step
from tasks.support.caching import NO_CACHE
from tasks.support.preflight import open_run

log = logging.getLogger(__name__)


@task(cache_policy=NO_CACHE)
def open_step(config: RunConfig, step: int | None, prefetch: Prefetch | None = None) -> tuple[Step, AdapterVersion]:
    """RunConfig, checked -> the step to make, and the adapter that it starts from.

    step: None is the run's next step. A number must be that step's.
    prefetch: May hold its rollout.

    Raises:
        ValueError: for a configuration that is not the run's, a base model that has changed, or a step that is not the next.
    """
    following = lineage.next_step(config.name)
    if step not in (None, following):
        raise ValueError(
            f"step {step} of run {config.name!r} cannot be made now: {following} steps are committed, the next is {following}"
        )
    open_run(config, nothing_committed="begin again")
    if (origin := replay.origin_of(config.name)) and following == origin.replayed_from.step:
        raise ValueError(
            f"run {config.name!r} begins with a replay of step {following} of run {origin.replayed_from.run!r} that is not committed yet: "
            "run that replay again, it goes on where it ended"
        )
    adapter = adapter_at(config, following)
    check_base(config.model, adapter)
    if judge_adapter.uses(config.reward):
        judge_adapter.prepared(config.reward.judge, adapter.base)  # before the rollout: its canary takes a while
    return start_step(config, following, prefetch), adapter
