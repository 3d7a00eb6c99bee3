"""Draw the prompts of a step."""

import logging

from prefect import task

from infra import base_model, dataset, prompts
from infra.config import DataConfig
from infra.files import read_json, record_of, run_folder, step_folder, write_json, write_json_lines
from infra.measures import measured
from infra.records import AdapterVersion, PromptBatch, Step
from tasks.caching import CACHED

log = logging.getLogger(__name__)

FILE, DATASET = "prompts.jsonl", "dataset.json"


@task(cache_policy=CACHED)
def draw_prompts(config: DataConfig, step: Step, adapter: AdapterVersion) -> PromptBatch:
    """Step -> PromptBatch, tokenized for the adapter's base model."""
    with measured(step.run, step.index, "draw"):
        return drawn(config, step, adapter)


def unchanged_fingerprint(config: DataConfig, run: str) -> str:
    """Of the data set, which must be the one that the run drew from first: in another one the same positions are other rows, some of them
    twice in an epoch and some never.

    Raises:
        ValueError: if it is not.
    """
    now, path = dataset.fingerprint(config), run_folder(run) / DATASET
    if not path.exists():
        write_json(path, now)
    elif (before := read_json(path)) != now:
        raise ValueError(
            f"data set {config.source!r} (split {config.split!r}) has changed since run {run!r} drew from it first: the digest of its rows is {now}, "
            f"recorded was {before}. Put it back, or begin another run"
        )
    return now


def drawn(config: DataConfig, step: Step, adapter: AdapterVersion, *, syncs: bool = True) -> PromptBatch:
    """syncs: See infra.files; what is drawn again in any case need not wait for the disk."""
    fingerprint = unchanged_fingerprint(config, step.run)
    found = prompts.draw(config, base_model.locate(adapter.base.id), step=step.index, seed=step.seed)
    path = write_json_lines(step_folder(step) / FILE, (prompt._asdict() for prompt in found), syncs=syncs)
    log.info("%d prompts, the first: %s", len(found), found[0].question)
    return PromptBatch(
        run=step.run,
        step=step.index,
        file=record_of(path),
        num_prompts=len(found),
        num_spare_prompts=config.num_spare_prompts,
        dataset_fingerprint=fingerprint,
        first_row=found[0].prompt_id,
    )
