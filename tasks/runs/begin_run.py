"""Open a run, after the pre-flight check."""

from prefect import task

from infra.config import RunConfig
from infra.progress.brief import brief
from infra.runs import lineage, run_state
from infra.runs.evaluations import stalled
from infra.runs.lineage import next_step
from infra.tracking import mlflow_address
from tasks.support import artifacts
from tasks.support.caching import NO_CACHE
from tasks.support.preflight import open_run


@task(cache_policy=NO_CACHE)
def begin_run(config: RunConfig) -> int:
    """RunConfig, checked -> the number of committed steps: the run continues from there.

    Raises:
        ValueError: for a configuration that differs from the one that the run was started with.
    """
    run_state.forget_stop(config.name)
    open_run(config, nothing_committed="begin again")
    mlflow_address.warn_at_start(config.name)
    artifacts.note_run_page(config.name)
    artifacts.link_to_mlflow(config.name)
    lineage.check(config.name)
    committed = next_step(config.name)
    if committed >= config.num_steps:
        brief.info("run %s: no step to make: num_steps is %d, committed steps: %d", config.name, config.num_steps, committed)
    else:
        last = config.num_steps - 1
        steps = f"step {last}" if committed == last else f"steps {committed} to {last}"
        brief.info("run %s: %s%s", config.name, steps, page_line())
    return committed


def page_line() -> str:
    """The address of this flow run's page, if it has one."""
    return "".join(f"; {url}" for url in artifacts.page_of_this_flow().values())


def is_over(config: RunConfig, version: int) -> bool:
    """Whether all steps are made, a person has requested a stop, or the evaluations so far show no progress."""
    return version >= config.num_steps or run_state.is_asked_to_stop(config.name) or stalled(config, version)
