"""Draw and tokenize the prompts of a step, and write them to its folder."""

import logging

from infra.config import DataConfig
from infra.data import dataset, prompts
from infra.data.prompts import Prompt
from infra.models import base_model
from infra.records import AdapterVersion, CarriedOver, PromptBatch, Step
from infra.store.files import read_json, read_json_lines, record_of, verified, write_json, write_json_lines
from infra.store.layout import RunFolder, StepFolder

log = logging.getLogger(__name__)


def unchanged_fingerprint(config: DataConfig, run: str) -> str:
    """Of the data set, which must be the one that the run drew from first: in another one the same positions are other rows, some of them
    twice in an epoch and some never.

    Raises:
        ValueError: if it is not.
    """
    now, path = dataset.fingerprint(config), RunFolder.of(run).dataset_fingerprint
    if not path.exists():
        write_json(path, now)
    elif (before := read_json(path)) != now:
        raise ValueError(
            f"data set {config.source!r} (split {config.split!r}) has changed since run {run!r} drew from it first: the digest of its rows is {now}, "
            f"recorded was {before}. Put it back, or begin another run"
        )
    return now


def drawn(
    config: DataConfig, step: Step, adapter: AdapterVersion, left_over: CarriedOver | None = None, *, syncs: bool = True
) -> PromptBatch:
    """syncs: See infra.store.files; what is drawn again in any case need not wait for the disk."""
    fingerprint = unchanged_fingerprint(config, step.run)
    folder, goes_on = base_model.locate(adapter.base.id), left_over is not None
    begun = _prompts_of(left_over) if left_over else []
    fresh = prompts.draw(config, folder, step=step.index, seed=step.seed, goes_on=goes_on)
    found = [*begun, *fresh]
    prompts.check_step(config, [prompt.row_number for prompt in found], step.index)
    path = write_json_lines(StepFolder.of(step).prompts, (prompt._asdict() for prompt in found), syncs=syncs)
    num_held_out = len(dataset.rows(config)) - len(dataset.part_rows(config))
    held_out = f" ({num_held_out} rows of the file are held out for evaluations)" if num_held_out else ""
    log.info("%d prompts%s, the first: %s", len(found), held_out, found[0].question)
    return PromptBatch(
        run=step.run,
        step=step.index,
        file=record_of(path),
        num_prompts=len(found),
        num_oversampled_prompts=config.num_oversampled_prompts,
        partial_rollouts=config.partial_rollouts,
        num_begun_prompts=len(begun),
        begun=left_over.samples if left_over else None,
        begun_engine_versions=left_over.engine_versions if left_over else "",
        dataset_fingerprint=fingerprint,
        first_row=fresh[0].prompt_id,
    )


def _prompts_of(left_over: CarriedOver) -> list[Prompt]:
    asked = [Prompt(**row) for row in read_json_lines(verified(left_over.prompts))]
    return [prompt for prompt in asked if prompt.prompt_id in left_over.prompt_ids]
