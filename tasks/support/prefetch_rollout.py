"""Prefetch the next step's rollout: start it before that step.

on-policy          adapter k+1 is served          -> the engine samples for step k+1 with adapter k+1 while step k is recorded
one step off it    step k trains to adapter k+1      meanwhile the engine samples for step k+1 with adapter k

Prefetched samples are in the next step's folder like any rollout: journal first, under the digests of the inputs that decide them. So the
next step finds the rollout there, or the part of it that survived a crash. It is still a transaction of its own.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from infra.concurrency.prefetch import Prefetch
from infra.config import EngineConfig, RunConfig
from infra.data.prompt_batch import drawn
from infra.processes.gpu_lock import keeps_lock
from infra.progress import work as progress
from infra.records import AdapterVersion, CarriedOver, Rollouts, Step
from infra.runs import run_state
from infra.runs.evaluations import is_due
from infra.runs.lineage import adapter_at
from infra.store.layout import step_folder
from tasks.support.rollout import finished, made_from_drawn, sample_what_is_missing

log = logging.getLogger(__name__)


def max_staleness(config: RunConfig) -> int:
    return config.trainer.loss.correction.max_staleness


def behavior_adapter(config: RunConfig, step: Step, adapter: AdapterVersion) -> AdapterVersion:
    """Return the adapter that samples for a step: its own, or that of the previous step. adapter: The one from which the step starts."""
    return adapter_at(config, step.index - 1) if max_staleness(config) and step.index > step.first_step else adapter


@contextmanager
def rollout_during_training(config: RunConfig, engine: EngineConfig, step: Step, adapter: AdapterVersion) -> Iterator[None]:
    """Sample for the next step in parallel to the block, if configured and if there is a next step. Ends when both have ended. If the
    rollout fails, the next step generates the missing samples. If the block fails, it waits for the rollout, and no sample is lost."""
    following = _following(step)
    if not max_staleness(config) or following.index >= config.num_steps:
        yield
        return
    with Prefetch() as prefetch:
        prefetch.start(step_folder(following), keeps_lock(_roll_out_unwatched), config, engine, following, adapter)
        yield


def prefetch_next_rollout(
    config: RunConfig,
    engine: EngineConfig,
    step: Step,
    trained: AdapterVersion,
    rollouts: Rollouts,
    prefetch: Prefetch | None,
) -> None:
    """Start the next step's rollout if that is the run's next work. The engine serves its adapter at this point, while the finished step is still
    being written. Prefect's end of one flow run and start of another take a second or more. The next step's `roll_out` joins the rollout.

    prefetch: That of the run. None for a single step, whose process ends with it.
    """
    following = _following(step)
    is_next = following.index < config.num_steps and not is_due(config.evaluation, following.index, config.num_steps)
    is_alone = config.played is None and config.data.max_draws == 1
    is_next = is_next and not run_state.is_asked_to_stop(config.name) and is_alone
    if prefetch is not None and is_next and not max_staleness(config):
        log.info("the rollout of step %d begins", following.index)
        prefetch.start(step_folder(following), keeps_lock(_roll_out), config, engine, following, trained, rollouts.left_over)


def _following(step: Step) -> Step:
    return step.model_copy(update={"index": step.index + 1})


def _roll_out_unwatched(config: RunConfig, engine: EngineConfig, step: Step, adapter: AdapterVersion) -> None:
    with progress.unwatched():  # the trainer's bar is being drawn
        _roll_out(config, engine, step, adapter)


def _roll_out(
    config: RunConfig, engine: EngineConfig, step: Step, adapter: AdapterVersion, left_over: CarriedOver | None = None
) -> None:
    prompts = drawn(config.training, step, adapter, left_over, syncs=False)  # the step's own task draws them again
    inputs = made_from_drawn(engine, config.sampling, prompts, adapter)
    if finished(step_folder(prompts), inputs) is None:
        sample_what_is_missing(engine, config.sampling, prompts, adapter, inputs)
