"""Prefetch the rollouts of later steps: start them before those steps.

on-policy          adapter k+1 is served          -> the engine samples for step k+1 with adapter k+1 while step k is recorded
n steps off it     step k trains to adapter k+1      meanwhile the engine samples for steps k+1 to k+n, with adapters k+1-n to k

Prefetched samples are in their step's folder like any rollout: journal first, under the digests of the inputs that decide them. So that
step finds the rollout there, or the part of it that survived a crash. It is still a transaction of its own. These folders are the queue:
which adapter samples for a step is decided by its number alone, never by who was faster, so a resumed run makes the same samples.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from infra.concurrency.prefetch import Prefetch
from infra.config import EngineConfig, RunConfig
from infra.data.prompt_batch import drawn
from infra.processes.gpu_lock import keeps_lock
from infra.records import AdapterSwitch, AdapterVersion, CarriedOver, Rollouts, ScoredBefore, Step
from infra.runs import run_state
from infra.runs.evaluations import is_due
from infra.runs.lineage import adapter_at
from infra.store.layout import StepFolder, step_folder
from tasks.support.episode_rollout import made_from_episodes, play_what_is_missing
from tasks.support.rollout import finished_with_switch, made_from_drawn, sample_what_is_missing
from tasks.support.rollouts import in_flight

log = logging.getLogger(__name__)


def max_staleness(config: RunConfig) -> int:
    return config.trainer.loss.correction.max_staleness


def behavior_adapter(config: RunConfig, step: Step, adapter: AdapterVersion) -> AdapterVersion:
    """Return the adapter that samples for a step: that of the step max_staleness before it, or of the run's first step.

    adapter: The one from which the step starts.
    """
    sampling = max(step.first_step, step.index - max_staleness(config))
    return adapter if sampling == step.index else adapter_at(config, sampling)


def adapter_switch(config: RunConfig, step: Step) -> AdapterSwitch | None:
    """Return when a step's rollout goes on with the adapter after the one that began it. None: never. The first max_staleness steps of a run begin
    with its first adapter, as it does not have an older one."""
    made_by, longest = step.index - max_staleness(config), config.sampling.max_output_tokens
    if not config.trainer.loss.correction.in_flight_updates or made_by < step.first_step or longest < 2:
        return None
    return AdapterSwitch(run=config.name, made_by_step=made_by, pause_at=longest // 2 if config.engine.deterministic else 0)


@contextmanager
def rollouts_during_training(
    config: RunConfig, engine: EngineConfig, step: Step, adapter: AdapterVersion, prefetch: Prefetch | None = None
) -> Iterator[None]:
    """Sample for the next max_staleness steps of the run in parallel to the block. The oldest comes first, and what was started in an earlier
    step goes on. If a rollout fails, its step generates the missing samples. If the block fails, no sample is lost.

    prefetch: That of the run, whose rollouts go on after the block. None for a single step: the rollout that has begun ends with the block.
    """
    with nullcontext(prefetch) if prefetch is not None else Prefetch() as ahead:
        for later in _later_steps(config, step):
            behavior = adapter if later.index - max_staleness(config) == step.index else behavior_adapter(config, later, adapter)
            folder, roll_out_later = step_folder(later), keeps_lock(_roll_out)
            switch = adapter_switch(config, later)
            ahead.start(folder, roll_out_later, config, engine, later, behavior, None, None, switch, lambda: not ahead.is_ending)
        yield


def num_steps_ahead(config: RunConfig, step: int) -> int:
    """Return how many steps after this one have all their samples."""
    later = range(step + 1, step + 1 + max_staleness(config))
    return sum(StepFolder.at(config.name, index).samples_inputs.exists() for index in later)


def prefetch_next_rollout(
    config: RunConfig,
    engine: EngineConfig,
    step: Step,
    trained: AdapterVersion,
    rollouts: Rollouts,
    prefetch: Prefetch | None,
    measured: ScoredBefore | None = None,
) -> None:
    """Start the next step's rollout if that is the run's next work. The engine serves its adapter at this point, while the finished step is still
    being written. Prefect's end of one flow run and start of another take a second or more. The next step's `roll_out` joins the rollout.

    prefetch: That of the run. None for a single step, whose process ends with it.
    measured: What the next step's curriculum knows; without effect where there is none.
    """
    following = _following(step)
    is_next = following.index < config.num_steps and not is_due(config.evaluation, following.index, config.num_steps)
    is_next = is_next and not run_state.is_asked_to_stop(config.name) and config.data.max_draws == 1
    if prefetch is not None and is_next and not max_staleness(config):
        log.info("the rollout of step %d begins", following.index)
        known = measured if config.data.curriculum != "none" else None
        prefetch.start(
            step_folder(following), keeps_lock(_roll_out), config, engine, following, trained, rollouts.left_over, known
        )


def _later_steps(config: RunConfig, step: Step) -> list[Step]:
    """Return the steps whose rollouts may begin while this one trains; none after a request to stop."""
    last = min(step.index + max_staleness(config), config.num_steps - 1)
    if run_state.is_asked_to_stop(config.name):
        return []
    return [step.model_copy(update={"index": index}) for index in range(step.index + 1, last + 1)]


def _following(step: Step) -> Step:
    return step.model_copy(update={"index": step.index + 1})


def _roll_out(
    config: RunConfig,
    engine: EngineConfig,
    step: Step,
    adapter: AdapterVersion,
    left_over: CarriedOver | None = None,
    known: ScoredBefore | None = None,
    switch: AdapterSwitch | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    prompts = drawn(
        config.training, step, adapter, left_over, measured=known, syncs=False
    )  # the step's own task draws them again
    inputs = made_from_episodes(made_from_drawn(engine, config.sampling, prompts, adapter), config.played)
    inputs = in_flight.with_switch(inputs, switch)
    if finished_with_switch(step_folder(prompts), inputs, switch) is not None:
        return
    if config.played is not None:
        play_what_is_missing(engine, config.sampling, config.played, prompts, adapter, inputs)
    else:
        with suppress(in_flight.NotWanted):
            sample_what_is_missing(engine, config.sampling, prompts, adapter, inputs, switch, is_wanted)
