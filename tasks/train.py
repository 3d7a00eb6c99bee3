"""Train: adapter k and a batch sampled by it -> adapter k+1. A retry finds the committed result and does not step twice."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
from prefect import task

from infra.colocation import microbatch
from infra.colocation.trainer_memory import model_in
from infra.config import TrainerConfig
from infra.data.prefix_tree import PrefixTree, sort_key
from infra.failures import TrainingFailed
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY, ENGINE_WEIGHTS, TrainJob, TrainResult
from infra.megatron.protocol.optimizer_files import MOMENTS, num_steps
from infra.records import AdapterVersion, Record, TrainBatch
from infra.runs import lineage
from infra.store import code_digest, digests
from infra.store.files import fresh_folder, path_of, publish_folder, read_note, record_of, write_note
from infra.store.layout import StepFolder, adapter_folder
from infra.telemetry import memory_usage, program_versions
from infra.telemetry.timings import measured
from infra.trainers import trainer_of
from infra.trainers.interface import TrainerOutOfMemory
from infra.trainers.jobs import job_of
from tasks.support.caching import NO_CACHE
from tasks.support.retries import BACKOFF, MAX_RETRIES, worth_another_try

log = logging.getLogger(__name__)

INPUTS_KEY = "state/made_from.json"
PROGRAM = "infra.megatron"
SMALLEST_MICROBATCH_TOKENS = 256
MISMATCH = "mismatch/mean_abs_logprob_diff"


class MadeFrom(Record):
    """The content of an adapter's INPUTS_KEY."""

    inputs: dict[str, str]
    sha256: dict[str, str]
    """Digests of the adapter's files, by their names in its folder."""
    result: str
    """Digest of the trainer's report."""


def made_from(inputs: dict[str, str], folder: Path, known: dict[str, str], result: Path) -> MadeFrom:
    """Return what the next attempt knows a trained adapter by.

    known: Digests of its files that were computed while they were written; those of the others are computed here.
    """
    others = {name: digests.sha256_of(folder / name) for name in {ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY} - known.keys()}
    return MadeFrom(inputs=inputs, sha256=known | others, result=digests.sha256_of(result))


def inputs_key(config: TrainerConfig, batch: TrainBatch, adapter: AdapterVersion) -> dict[str, str]:
    """Return the inputs that decide the result of a training step."""
    # The size of micro-batches may come from what earlier steps measured; it changes the result by rounding only. Which GPUs train, and whose
    # copy of the experts they read, not at all.
    without = {"max_tokens_per_microbatch", "first_gpu", "share_experts"}
    trainer = hashlib.sha256(config.model_dump_json(exclude=without).encode()).hexdigest()
    program = code_digest.digest(PROGRAM)
    return {
        "adapter": adapter.sha256,
        "base": adapter.base.sha256,
        "seed": str(adapter.seed),
        "batch": batch.file.sha256,
        "trainer": trainer,
        "program": program,
        "versions": program_versions.key_of(program_versions.of_trainer()),
    }


def committed(adapter: AdapterVersion, inputs: dict[str, str], result: Path) -> AdapterVersion | None:
    """Return the next adapter, if it was already trained from exactly these inputs and the trainer's report is in `result`."""
    folder = adapter_folder(adapter.run, adapter.version + 1)
    found = read_note(folder / INPUTS_KEY, MadeFrom)
    if found is None or found.inputs != inputs:
        return None
    whole = {
        name: (folder / name).is_file() and digests.sha256_of(folder / name) == sha256 for name, sha256 in found.sha256.items()
    }
    whole[result.name] = result.is_file() and digests.sha256_of(result) == found.result
    if not all(whole.values()):
        lost = ", ".join(name for name, is_whole in whole.items() if not is_whole)
        log.warning(
            "adapter %d was made from these inputs, but not all of it is there (%s): training again",
            adapter.version + 1,
            lost,
        )
        return None
    return next_version(adapter)


def next_version(adapter: AdapterVersion) -> AdapterVersion:
    """Return the record of the adapter in the folder of the next version."""
    folder = adapter_folder(adapter.run, adapter.version + 1)
    files = {"weights": ADAPTER_WEIGHTS, "adapter_config": ADAPTER_CONFIG, **MOMENTS, "canary": CANARY}
    records = [record_of(folder / name) for name in files.values()]
    changes: dict[str, object] = {"version": adapter.version + 1, "num_optimizer_steps": num_steps(folder), "optimizer": None}
    changes["engine_weights"] = record_of(folder / ENGINE_WEIGHTS) if (folder / ENGINE_WEIGHTS).exists() else None
    return AdapterVersion.model_validate(dict(adapter) | changes | dict(zip(files, records, strict=True)))


def sizes_of(batch: TrainBatch) -> PrefixTree:
    """Return the sequences' tokens, and how many of them the trainer computes: what a group's sequences have in common counts once."""
    tensors = safetensors.numpy.load_file(path_of(batch.file))
    sequences, groups = np.split(tensors["tokens"], tensors["cu_seqlens"][1:-1]), tensors["groups"].tolist()
    order = sorted(range(len(sequences)), key=lambda i: (groups[i], sort_key(sequences[i])))
    return PrefixTree.of([sequences[i] for i in order], [groups[i] for i in order])


def smaller_microbatch(config: TrainerConfig, *, num_tokens: int, longest: int) -> int | None:
    """Return half the size of the micro-batches that ran out of memory, but at least the longest sequence. None if they cannot be smaller."""
    used = min(config.microbatch_tokens, num_tokens)
    smallest = max(longest, SMALLEST_MICROBATCH_TOKENS)
    return max(used // 2, smallest) if used > smallest else None


def train_in_smaller_and_smaller_microbatches(
    config: TrainerConfig, batch: TrainBatch, adapter: AdapterVersion, folder: Path
) -> TrainResult:
    """Run one job. If memory runs out, repeat it with smaller micro-batches, which give the same result."""
    while True:
        job = job_of(config, batch, adapter, folder)
        fresh_folder(job.output_dir)
        job.result_path.unlink(missing_ok=True)
        try:
            made = trainer_of(config).train(job, folder)
        except TrainerOutOfMemory:
            tree = sizes_of(batch)
            remember_out_of_memory(config, job, num_tokens=tree.num_rows)
            smaller = smaller_microbatch(config, num_tokens=tree.num_rows, longest=max(tree.lengths))
            if smaller is None:
                raise
            log.warning("out of memory with micro-batches of %d tokens, trying %d", config.microbatch_tokens, smaller)
            config = config.but(max_tokens_per_microbatch=smaller)
        else:
            remember_peak(config, job, made)
            return made


def remember_out_of_memory(config: TrainerConfig, job: TrainJob, *, num_tokens: int) -> None:
    """num_tokens: Of the whole batch: no micro-batch of it had more, however many were allowed."""
    if job.device == "cuda":
        microbatch.note_out_of_memory(config, model_in(job.model_path), tokens=min(config.microbatch_tokens, num_tokens))


def remember_peak(config: TrainerConfig, job: TrainJob, made: TrainResult) -> None:
    """Note how much memory a step took on a GPU: it sizes the micro-batches of later steps."""
    if job.device == "cuda" and made.microbatch_rows:
        model, size = model_in(job.model_path), {"num_rows": made.microbatch_rows, "num_logits": made.microbatch_logits}
        microbatch.note_peak(config, model, peak_gib=made.peak_memory_gib, **size)


def refuse_foreign_samples(config: TrainerConfig, batch: TrainBatch, metrics: Mapping[str, float]) -> None:
    """Refuse samples that do not match the trainer. The last of the checks on an engine, and the only one that sees every token of a step. It
    needs no canary and no running engine.

    Raises:
        TrainingFailed: if the engine's log-probs differ from the trainer's by more than trainer.max_mismatch.
    """
    found, allowed = metrics.get(MISMATCH), config.max_mismatch
    if found is not None and allowed is not None and found > allowed:
        raise TrainingFailed(
            f"step {batch.step} of run {batch.run!r}: {MISMATCH} is {found:.3g}, more than trainer.max_mismatch {allowed:g}. The model that gave "
            f"these samples was not adapter {batch.adapter_version} of this base model; nothing was made of them. To sample again: "
            f"ratchet drop {batch.run} --from {batch.step}; if engine and trainer may be so far apart, raise trainer.max_mismatch or set it "
            "to None"
        )


@task(cache_policy=NO_CACHE, retries=MAX_RETRIES, retry_delay_seconds=BACKOFF, retry_condition_fn=worth_another_try)
def train(config: TrainerConfig, batch: TrainBatch, adapter: AdapterVersion) -> AdapterVersion:
    """TrainBatch and AdapterVersion -> the next AdapterVersion. Its files are synced to disk when the step is committed. Before that, they are
    found again by their digests, not by Prefect's cache."""
    inputs = inputs_key(config, batch, adapter)
    folder = StepFolder.of(batch).train
    if (done := committed(adapter, inputs, folder.result)) is not None:
        log.info("adapter %d was already made from these inputs", done.version)
        return done
    with measured(batch.run, batch.step, "train"), memory_usage.most_noted(batch.run, batch.step, "training"):
        made = train_in_smaller_and_smaller_microbatches(config, batch, adapter, folder.path)
        refuse_foreign_samples(config, batch, made.metrics)
        for name, digest in made.files.items():
            digests.trust_digest(folder.adapter / name, digest)
        known = {name: digest.sha256 for name, digest in made.files.items()}
        note = made_from(inputs, folder.adapter, known, folder.result)
        lineage.check_not_recorded(adapter.run, adapter.version + 1, note.sha256[ADAPTER_WEIGHTS])
        write_note(folder.adapter / INPUTS_KEY, note.model_dump())
        publish_folder(folder.adapter, adapter_folder(adapter.run, adapter.version + 1), syncs=False)
    return next_version(adapter)
