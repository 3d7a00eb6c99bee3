"""Samples that were sampled and that no committed step was trained on, counted from a run's files.

A rollout may wait in the folder of a step that is not committed. The last step may carry over groups that no other step resumes. Over-sampling
drops complete groups. And a rollout is made again where its inputs have changed: the samples of another adapter are older than allowed.
"""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infra.eval_records import UnusedSamples
from infra.records import CarriedOver, File, PromptBatch, Rollouts
from infra.runs import history, lineage
from infra.store.digests import sha256_of
from infra.store.files import path_of, read_json, read_json_lines, read_note, write_json
from infra.store.journal import GrowingJournal
from infra.store.layout import RunFolder, StepFolder

Key = tuple[int, int]
"""Prompt id and sample index."""
SAMPLES, PROMPTS = "rollout/unused_samples", "rollout/unused_prompts"
"""Metrics of a committed step that has unused samples. A prompt is unused where none of its samples is trained on."""


def of_run(run: str) -> UnusedSamples:
    """Count a run's unused samples so far. A run that is continued may still use those that wait or are carried over."""
    committed = lineage.committed_steps(run)
    figures = [history.figures_at(run, step) or {} for step in committed]
    under_way = [path for path in RunFolder.of(run).steps.glob("[0-9]*") if int(path.name) not in committed]
    waiting = {key for path in under_way for key in _keys_in(StepFolder(path))}
    last = _carried_over(StepFolder.at(run, committed[-1])) if committed else None
    carried = _keys_carried(path_of(last.samples)) - waiting if last else set[Key]()
    prompts = {prompt_id for prompt_id, _ in waiting | carried} | set(last.prompt_ids if last else ())
    return UnusedSamples(
        num_dropped=int(sum(each.get(SAMPLES, 0) for each in figures)) + sum(map(_num_discarded, under_way)),
        num_waiting=len(waiting),
        num_carried_over=len(carried),
        num_prompts=int(sum(each.get(PROMPTS, 0) for each in figures)) + len(prompts),
    )


def metrics_of_step(prompts: PromptBatch, rollouts: Rollouts, num_over_sampled: int) -> dict[str, float]:
    """Return the metrics of a step with unused samples; none of a step without.

    num_over_sampled: Samples that its rollout has finished, has not taken, and does not carry over.
    """
    num_samples = num_over_sampled + _num_discarded(StepFolder.of(rollouts).path)
    num_prompts = 0
    if prompts.num_oversampled_prompts:
        carried = rollouts.left_over.prompt_ids if rollouts.left_over else ()
        num_prompts = prompts.num_prompts - rollouts.num_prompts - len(carried)
    return {SAMPLES: float(num_samples), PROMPTS: float(num_prompts)} if num_samples or num_prompts else {}


def _carried_over(folder: StepFolder) -> CarriedOver | None:
    found = read_json(folder.manifest).get("rollouts", {}).get("left_over")
    return CarriedOver.model_validate(found) if found else None


def note_replaced(folder: Path) -> None:
    """Count the samples of a finished rollout that is about to be made again with other inputs. Counts each rollout once."""
    step = StepFolder(folder)
    found = read_note(step.samples_inputs, dict[str, object])
    if found is None or not step.samples.exists():
        return
    _note(step, File.model_validate(found["file"]).sha256)


def note_lost(folder: Path) -> None:
    """Count the samples of a finished rollout whose inputs key is gone or damaged. No journal has them any more, so they are made again."""
    step = StepFolder(folder)
    is_recorded = step.samples_inputs.exists() or step.journal.exists() or step.episodes_journal.exists()
    if step.samples.exists() and not is_recorded:
        _note(step, sha256_of(step.samples))


def _note(step: StepFolder, digest: str) -> None:
    known = _replaced(step)
    if digest not in known:
        write_json(step.replaced, known | {digest: len(_keys_of_table(step.samples))})


def _replaced(folder: StepFolder) -> dict[str, int]:
    return read_note(folder.replaced, dict[str, int]) or {}


def _num_discarded(path: Path) -> int:
    """Samples in a step's folder, draws included, that were made again: of replaced rollouts, and in journals that were quarantined."""
    folder = StepFolder(path)
    aside = [each for name in (folder.journal.name, folder.episodes_journal.name) for each in path.rglob(f"{name}.aside-*")]
    replaced = [_replaced(StepFolder(each.parent)) for each in path.rglob(folder.replaced.name)]
    return sum(sum(each.values()) for each in replaced) + sum(len(_whole_samples(each)) for each in aside)


def _keys_in(folder: StepFolder) -> set[Key]:
    """The whole samples of a step that is not committed."""
    lines = [line for path in (folder.journal, folder.episodes_journal) for line in _whole_samples(path)]
    found = {(line["prompt_id"], line["sample_index"]) for line in lines}
    return found | (_keys_of_table(folder.samples) if folder.samples.exists() else set())


def _keys_carried(path: Path) -> set[Key]:
    """The samples in a step's left_over.parquet, or the episodes in its left_over.jsonl."""
    if path.suffix == ".parquet":
        return _keys_of_table(path)
    lines = [line for line in read_json_lines(path) if "fence" not in line]
    names = [line["episode"].split("/") for line in lines if "prompt_id" not in line]
    whole = {(line["prompt_id"], line["sample_index"]) for line in lines if "prompt_id" in line}
    return whole | {(int(prompt_id), int(index)) for prompt_id, index, *_ in names}


def _whole_samples(journal: Path) -> list[dict[str, Any]]:
    """The lines of a journal without prefixes."""
    return [line for line in GrowingJournal(journal).new_lines() if line.get("finish_reason") != "abort"]


def _keys_of_table(path: Path) -> set[Key]:
    table = pq.read_table(path, columns=["prompt_id", "sample_index"])
    return set(zip(table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
