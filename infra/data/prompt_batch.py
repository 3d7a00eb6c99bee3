"""Draw and tokenize the prompts of a step, and write them to its folder."""

import logging
from pathlib import Path

from pydantic import BaseModel

from infra.config import DataConfig
from infra.data import dataset, prompts
from infra.data.prompts import Prompt
from infra.models import base_model
from infra.records import AdapterVersion, CarriedOver, PromptBatch, RowCounts, Step
from infra.store.files import read_json_lines, read_record, record_of, verified, write_json, write_json_lines
from infra.store.layout import RunFolder, StepFolder

log = logging.getLogger(__name__)


class DrawnFrom(BaseModel):
    """The content of a run's dataset.json."""

    sha256: str
    """Digest of the rows that are trained on; see infra.data.dataset.fingerprint."""
    rows: RowCounts


def drawn_from(config: DataConfig, run: str, model_folder: Path) -> DrawnFrom:
    """Return the digest and the counts of the data set, which must be the one that the run drew from first: in another one the same positions
    are other rows, some of them twice in an epoch and some never.

    Raises:
        ValueError: if it is not.
    """
    now, path = dataset.fingerprint(config), RunFolder.of(run).dataset_fingerprint
    if not path.exists():
        found = DrawnFrom(sha256=now, rows=prompts.counts_of(config, model_folder))
        _log_counts(found.rows, config)
        write_json(path, found.model_dump())
        return found
    before = read_record(path, DrawnFrom, cure="remove it if the data set has not changed")
    if before.sha256 != now:
        raise ValueError(
            f"data set {config.source!r} (split {config.split!r}) has changed since run {run!r} drew from it first: the digest of its rows is {now}, "
            f"recorded was {before.sha256}. Put it back, or begin another run (rows that an evaluation's data set has are no part of it)"
        )
    return before


def _log_counts(found: RowCounts, config: DataConfig) -> None:
    what = {
        "left out by data.filter": found.num_filtered,
        "held out for evaluations": found.num_held_out,
        "left out because an evaluation's data set has their text": found.num_contaminated,
        f"of more than {config.max_prompt_tokens} tokens ({config.too_long})": found.num_too_long,
        "that share 13 words in a row with an evaluation's text": found.num_sharing_13_words,
    }
    said = "; ".join(f"{count} {about}" for about, count in what.items() if count)
    log.info("data set %s: %d rows%s", config.source, found.num_rows, f"; {said}" if said else "")


def drawn(
    config: DataConfig,
    step: Step,
    adapter: AdapterVersion,
    left_over: CarriedOver | None = None,
    num_wanted: int | None = None,
    *,
    syncs: bool = True,
) -> PromptBatch:
    """num_wanted: The first of the draw's prompts alone; None: all.

    syncs: See infra.store.files; what is drawn again in any case need not wait for the disk.
    """
    folder, goes_on = base_model.locate(adapter.base.id), left_over is not None
    source = drawn_from(config, step.run, folder)
    begun = _prompts_of(left_over) if left_over else []
    place = prompts.place_of(config, step.index, step.draw)
    fresh = prompts.draw(config, folder, step=place, seed=step.seed, goes_on=goes_on)[:num_wanted]
    found = [*begun, *fresh]
    prompts.check_step(config, [prompt.row_number for prompt in found], step.index)
    path = write_json_lines(StepFolder.of(step).prompts, (prompt._asdict() for prompt in found), syncs=syncs)
    log.info("%d prompts, the first: %s", len(found), found[0].question)
    return PromptBatch(
        run=step.run,
        step=step.index,
        draw=step.draw,
        file=record_of(path),
        num_prompts=len(found),
        num_oversampled_prompts=config.num_oversampled_prompts,
        partial_rollouts=config.partial_rollouts,
        num_begun_prompts=len(begun),
        begun=left_over.samples if left_over else None,
        begun_engine_versions=left_over.engine_versions if left_over else "",
        dataset_fingerprint=source.sha256,
        first_row=fresh[0].prompt_id,
        rows=source.rows,
    )


def _prompts_of(left_over: CarriedOver) -> list[Prompt]:
    asked = [Prompt(**row) for row in read_json_lines(verified(left_over.prompts))]
    return [prompt for prompt in asked if prompt.prompt_id in left_over.prompt_ids]
