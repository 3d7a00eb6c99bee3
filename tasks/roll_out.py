"""Sample completions from the adapter, and store them with their log-probs.

samples.journal (finished samples, while the rollout is under way) --> samples.parquet, then samples.inputs_key.json; then the journal is
removed. A rollout that is killed at any moment recovers its samples by the inputs that decide them, and generates only the rest.
"""

import logging

from prefect import task

from infra.concurrency.prefetch import Prefetch
from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.records import AdapterSwitch, AdapterVersion, PromptBatch, Rollouts
from infra.store.files import record_of
from infra.store.layout import StepFolder, step_folder
from infra.store.samples import groups_of
from tasks.support.caching import cached
from tasks.support.episode_rollout import made_from_episodes, play_what_is_missing
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try
from tasks.support.rollout import counts_of, finished_with_switch, left_over, made_from_drawn, sample_what_is_missing
from tasks.support.rollouts import in_flight

log = logging.getLogger(__name__)


@task(
    cache_policy=cached(without=("prefetch",)),
    retries=MAX_RETRIES,
    retry_delay_seconds=BACKOFF,
    retry_condition_fn=worth_another_try,
)
def roll_out(
    engine: EngineConfig,
    sampling: SamplingConfig,
    prompts: PromptBatch,
    adapter: AdapterVersion,
    prefetch: Prefetch | None = None,
    environment: PlayedEnvironment | None = None,
    switch: AdapterSwitch | None = None,
) -> Rollouts:
    """PromptBatch -> Rollouts. A prefetched rollout is joined; samples that it lacks are generated here.

    prefetch: May hold this rollout. It does not affect the samples.
    environment: What the samples are episodes of. None: each is one answer.
    switch: When a newer adapter continues the rollout. It is the rollout's adapter then. None: never.
    """
    if prefetch is not None:
        prefetch.join(step_folder(prompts))
    inputs = in_flight.with_switch(made_from_episodes(made_from_drawn(engine, sampling, prompts, adapter), environment), switch)
    samples = finished_with_switch(step_folder(prompts), inputs, switch)
    if samples is None and environment is not None:
        samples = play_what_is_missing(engine, sampling, environment, prompts, adapter, inputs)
    elif samples is None:
        samples = sample_what_is_missing(engine, sampling, prompts, adapter, inputs, switch)
    if switch is not None:
        adapter = in_flight.adapter_of(StepFolder.of(prompts), inputs, adapter, switch)
    return Rollouts(
        run=prompts.run,
        step=prompts.step,
        draw=prompts.draw,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        file=record_of(StepFolder.of(prompts).samples),
        num_prompts=len(groups_of(samples)),
        group_size=sampling.group_size,
        temperature=sampling.temperature,
        left_over=left_over(step_folder(prompts)),
        is_judged=environment is not None,
        **counts_of(samples, of_episodes=environment is not None),
    )
