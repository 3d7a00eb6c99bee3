"""Draw the prompts of a step."""

import logging

from prefect import task

from infra import base_model, dataset, prompts
from infra.config import DataConfig
from infra.files import record_of, step_folder, write_json_lines
from infra.measures import measured
from infra.records import AdapterVersion, PromptBatch, Step
from tasks.caching import CACHED

log = logging.getLogger(__name__)

FILE = "prompts.jsonl"


@task(cache_policy=CACHED)
def draw_prompts(config: DataConfig, step: Step, adapter: AdapterVersion) -> PromptBatch:
    """Step -> PromptBatch, tokenized for the adapter's base model."""
    with measured(step.run, step.index, "draw"):
        return drawn(config, step, adapter)


def drawn(config: DataConfig, step: Step, adapter: AdapterVersion, *, syncs: bool = True) -> PromptBatch:
    """syncs: See infra.files; what is drawn again in any case need not wait for the disk."""
    found = prompts.draw(config, base_model.locate(adapter.base.id), step=step.index, seed=step.seed)
    path = write_json_lines(step_folder(step) / FILE, (prompt._asdict() for prompt in found), syncs=syncs)
    log.info("%d prompts, the first: %s", len(found), found[0].question)
    return PromptBatch(
        run=step.run,
        step=step.index,
        file=record_of(path),
        num_prompts=len(found),
        num_spare_prompts=config.num_spare_prompts,
        dataset_fingerprint=dataset.fingerprint(config),
        first_row=found[0].prompt_id,
    )
