"""Draw and tokenize the prompts of a step, and write them to its folder."""

import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from infra.config import DataConfig
from infra.data import dataset, prompts
from infra.data.forms import curriculum
from infra.data.forms.curriculum import PassRate
from infra.data.prompts import Prompt
from infra.models import base_model
from infra.records import AdapterVersion, CarriedOver, File, PromptBatch, RowCounts, ScoredBefore, ScoredRollouts, Step
from infra.store.files import read_json_lines, read_record, record_of, verified, write_json, write_json_lines
from infra.store.layout import RunFolder, StepFolder
from infra.store.samples import read_rewards

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
    measured: ScoredBefore | None = None,
    *,
    syncs: bool = True,
) -> PromptBatch:
    """num_wanted: The first of the draw's prompts alone; None: all.

    measured: What the curriculum knows; None without one.

    syncs: See infra.store.files; what is drawn again in any case need not wait for the disk.
    """
    folder, goes_on = base_model.locate(adapter.base.id), left_over is not None
    source = drawn_from(config, step.run, folder)
    begun = _prompts_of(left_over) if left_over else []
    place = prompts.place_of(config, step.index, step.draw)
    rates = rates_after(measured, step.index - 1) if measured else {}
    fresh = prompts.draw(config, folder, step=place, seed=step.seed, goes_on=goes_on, rates=rates)[:num_wanted]
    found = [*begun, *fresh]
    numbers = [prompt.row_number for prompt in found]
    prompts.check_step(config, numbers, step.index)
    path = write_json_lines(StepFolder.of(step).prompts, (prompt.to_json() for prompt in found), syncs=syncs)
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
        draw_counts=curriculum.counts_of(config, rates, numbers) if measured else {},
        pass_rates=_written(step, rates, syncs=syncs) if measured else None,
    )


def _written(step: Step, rates: Mapping[int, PassRate], *, syncs: bool) -> File:
    path = StepFolder.at(step.run, step.index).pass_rates  # one file for all draws of the step
    return record_of(write_json_lines(path, curriculum.lines_of(rates), syncs=syncs))


def measured_in(batch: PromptBatch, scored: ScoredRollouts) -> ScoredBefore:
    """Return what the curriculum of the step after this one knows."""
    return ScoredBefore(pass_rates=batch.pass_rates, prompts=batch.file, groups=batch.draws or scored.file)


def rates_after(measured: ScoredBefore, step: int) -> dict[int, PassRate]:
    """Return the pass rates by row number: those that were known, and the newer ones of the groups that were scored then.

    step: The step that scored them.

    Raises:
        DigestMismatch: for a file that is not what it was.
    """
    rates = curriculum.rates_of(read_json_lines(verified(measured.pass_rates))) if measured.pass_rates else {}
    if not measured.groups:
        return rates
    path = verified(measured.groups)
    if path.suffix == ".jsonl":
        return rates | {
            line["row_number"]: PassRate(line["pass_rate"], line["num_judged"], step)
            for line in read_json_lines(path)
            if line["pass_rate"] is not None
        }
    assert measured.prompts, "scored samples have their prompts"
    rows = {line["prompt_id"]: line["row_number"] for line in read_json_lines(verified(measured.prompts))}
    return rates | {
        rows[number]: PassRate(curriculum.pass_rate_of(rewards), len(rewards), step)
        for number, rewards in read_rewards(path).items()
    }


def _prompts_of(left_over: CarriedOver) -> list[Prompt]:
    asked = [Prompt(**row) for row in read_json_lines(verified(left_over.prompts))]
    return [prompt for prompt in asked if prompt.prompt_id in left_over.prompt_ids]
