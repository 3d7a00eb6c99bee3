"""Check a job without building the model. Each error is a ValueError of one line."""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from infra.data import advantages
from infra.megatron.lora.peft_files import check_adapter
from infra.megatron.loss.batch import Batch, check_tokens, read_batch
from infra.megatron.protocol.job import TrainJob
from infra.models.architecture import Architecture, layout_problem, read_architecture
from infra.models.weights import check_base


@dataclass(frozen=True)
class Inputs:
    """Inputs that the checks read, for the job to use."""

    architecture: Architecture
    batch: Batch


def read_job(path: Path) -> TrainJob:
    """Read a job file. Raises ValueError if it cannot be read or is no job; names the file and the field."""
    try:
        return TrainJob.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"job file {path} cannot be read: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'job'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"job file {path}: {problems}") from error


def check(job: TrainJob, world_size: int, *, is_kept: bool = False) -> Inputs:
    """Check a job. Writes nothing.

    is_kept: This program has the model and the adapter's content already, and reads neither again: their files' tensors are not looked at.

    Raises:
        ValueError: for the first problem.
    """
    _check_places(job)
    if job.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("job: device is cuda, but torch sees no GPU here")
    architecture = read_architecture(job.model_path)
    _check_layout(job, architecture, world_size)
    # Perf: 0.47 s -> 2 ms where an adapter has 37 248 tensors, as with experts of 30B-A3B (one CPU core, docs/results/speed.md).
    if not is_kept:
        check_base(job.model_path, architecture)
    check_adapter(job, architecture, reads_tensors=not is_kept)
    batch = read_batch(job.batch_path)
    check_tokens(
        job.batch_path, batch, vocab_size=architecture.vocab_size, max_tokens_per_microbatch=job.trainer.microbatch_tokens
    )
    _check_sampler(job, batch)
    _check_rewards(job, batch)
    if job.trainer.routing_replay:
        _check_routes(job, architecture, batch)
    else:
        batch = dataclasses.replace(batch, routes=None)
    return Inputs(architecture, batch)


def _check_routes(job: TrainJob, a: Architecture, batch: Batch) -> None:
    if a.experts is None:
        raise ValueError(f"job: trainer.routing_replay true with model {job.model_path}: it is no mixture of experts")
    if batch.routes is None:
        raise ValueError(
            f"batch {job.batch_path} has no routes, trainer.routing_replay needs them: either the engine recorded none, or it retracted every sample"
        )
    kind = torch.uint8 if a.experts.count <= 256 else torch.int16
    found, wanted = list(batch.routes.shape), [len(batch.tokens), a.num_layers, a.experts.per_token]
    if found != wanted or batch.routes.dtype is not kind:
        raise ValueError(f"batch {job.batch_path}: routes are {batch.routes.dtype} {found}, should be {kind} {wanted}")
    lowest, highest = (int(value) for value in batch.routes.aminmax())
    if lowest < 0 or highest >= a.experts.count:
        raise ValueError(
            f"batch {job.batch_path}: routes are {lowest} to {highest}, the model has the experts 0 to {a.experts.count - 1}"
        )


def _check_sampler(job: TrainJob, batch: Batch) -> None:
    trained = (job.adapter_version, job.adapter_sha256)
    sampler = (job.sampler_version, job.sampler_sha256) if job.sampler_version is not None else trained
    if (batch.adapter_version, batch.adapter_sha256) != sampler:
        whose = "trains" if sampler == trained else "expects samples of"
        raise ValueError(
            f"batch {job.batch_path} was sampled by adapter version {batch.adapter_version} ({batch.adapter_sha256}), "
            f"the job {whose} version {sampler[0]} ({sampler[1]})"
        )
    age, max_staleness = job.adapter_version - batch.adapter_version, job.trainer.loss.correction.max_staleness
    if sampler != trained and not 0 < age <= max_staleness:
        raise ValueError(
            f"batch {job.batch_path} was sampled by an adapter {age} steps older than version {job.adapter_version}, which the job trains: "
            f"trainer.loss.correction.max_staleness is {max_staleness}"
        )


def _check_rewards(job: TrainJob, batch: Batch) -> None:
    if batch.advantage not in (None, *advantages.KINDS):
        raise ValueError(
            f"batch {job.batch_path}: advantage {batch.advantage!r} is unknown; known are {', '.join(advantages.KINDS)}"
        )
    kl = job.trainer.loss.kl
    if kl.coefficient == 0 or kl.where == "loss":
        return
    for name in ("groups", "rewards", "advantage"):
        if getattr(batch, name) is None:
            raise ValueError(f"batch {job.batch_path}: a KL penalty in the reward needs the batch's {name}")
    alone = [group for group, count in Counter(batch.groups).items() if count == 1]
    if alone and batch.advantage in advantages.WITHIN_GROUPS:
        raise ValueError(
            f"batch {job.batch_path}: group {alone[0]} has 1 sequence, advantage {batch.advantage!r} needs 2 or more ({len(alone)} such)"
        )


def _check_places(job: TrainJob) -> None:
    if not job.output_dir.is_dir():
        raise ValueError(f"job: output_dir {job.output_dir} is no folder")
    if found := sorted(path.name for path in job.output_dir.iterdir()):
        raise ValueError(f"job: output_dir {job.output_dir} is not empty, it holds {', '.join(found[:5])}")
    if job.result_path.exists():
        raise ValueError(f"job: result_path {job.result_path} is already there: {json.dumps(job.result_path.read_text()[:80])}")
    if not job.result_path.parent.is_dir():
        raise ValueError(f"job: the folder of result_path {job.result_path} is missing")


def _check_layout(job: TrainJob, architecture: Architecture, world_size: int) -> None:
    t = job.trainer
    if world_size != t.num_processes:
        raise ValueError(
            f"torchrun started {world_size} processes, the job's trainer.num_processes is {t.num_processes}: "
            f"run it with --nproc-per-node {t.num_processes}"
        )
    problem = layout_problem(
        architecture,
        num_processes=world_size,
        tensor_parallel=t.tensor_parallel,
        expert_parallel=t.expert_parallel,
        sequence_parallel=t.sequence_parallel,
    )
    if problem:
        raise ValueError(f"job: {problem}")
