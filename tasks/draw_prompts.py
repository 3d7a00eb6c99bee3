"""Draw the prompts of a step."""

import logging
from typing import Any

from prefect import task

from infra.config import DataConfig, RunConfig
from infra.data import dataset
from infra.data.prompt_batch import drawn, measured_in
from infra.records import AdapterVersion, CarriedOver, PromptBatch, ScoredBefore, Step
from infra.runs.manifest import read_manifest
from infra.runs.replay import origin_of
from infra.store.layout import StepFolder, step_folder_of
from infra.telemetry.timings import measured, verb_of
from tasks.support.caching import cached

log = logging.getLogger(__name__)


def also_decided_by(inputs: dict[str, Any]) -> str:
    """The digest of the data set, which may have changed under its name."""
    return dataset.fingerprint(inputs["config"])


@task(cache_policy=cached(also=also_decided_by))
def draw_prompts(
    config: DataConfig,
    step: Step,
    adapter: AdapterVersion,
    left_over: CarriedOver | None = None,
    num_wanted: int | None = None,
    known: ScoredBefore | None = None,
) -> PromptBatch:
    """Step -> PromptBatch, tokenized for the adapter's base model.

    left_over: Carried-over groups: the previous step aborted them, and this one resumes them.
    num_wanted: With dynamic sampling: the number of prompts of a later draw; None: all.
    known: With a curriculum: the pass rates that decide which rows are drawn.
    """
    with measured(step.run, step.index, verb_of("draw", step.draw)):
        return drawn(config, step, adapter, left_over, num_wanted, known)


def carried_over(config: RunConfig, step: Step) -> CarriedOver | None:
    """Return the groups carried over into a step. None in a run's first step, and without partial rollouts.

    Raises:
        ValueError: if the previous step should have left groups, but did not.
    """
    if not config.data.partial_rollouts or step.index == step.first_step:
        return None
    before = step_folder_of(config.name, step.index - 1)
    if (found := read_manifest(before).rollouts.left_over) is None:
        raise ValueError(
            f"data.partial_rollouts: {StepFolder(before).manifest} says of no group that it goes on in step {step.index}"
        )
    return found


def known_pass_rates(config: RunConfig, step: Step) -> ScoredBefore | None:
    """Return what a step's curriculum knows: nothing in a run's first step, but for a replay what the old step knew. None without one."""
    if config.data.curriculum == "none":
        return None
    if step.index == step.first_step:
        origin = origin_of(config.name)
        return ScoredBefore(pass_rates=origin.pass_rates if origin else None)
    before = read_manifest(step_folder_of(config.name, step.index - 1))
    return measured_in(before.prompts, before.scored)
