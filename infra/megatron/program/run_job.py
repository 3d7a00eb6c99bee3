"""Run a job whose input has passed the checks: build, load, one step, write; result.json last."""

import resource
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from infra.machine import devices
from infra.machine.read_versions import TRAINER_PACKAGES, versions
from infra.megatron.checkpoint import adapter_state
from infra.megatron.checkpoint import save as checkpoint
from infra.megatron.checkpoint.adapter_state import Values
from infra.megatron.checkpoint.shared_experts import ExpertsChanged
from infra.megatron.model import attention, kernels
from infra.megatron.model.build import base_dtype
from infra.megatron.model.experts import grouped_gemm
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.program import canary, optimizer, throughput
from infra.megatron.program.check_job import Inputs
from infra.megatron.program.phase_timer import Phases
from infra.megatron.program.session import TrainerSession
from infra.megatron.program.train_step import MicroBatchSize, NotFinite, train_step
from infra.megatron.protocol.job import CANARY, Canary, TrainJob, TrainResult
from infra.models.architecture import Architecture
from infra.store import files


class Learnt(NamedTuple):
    """The results of a step."""

    metrics: dict[str, float]
    largest: MicroBatchSize
    """This rank's largest micro-batch."""
    canary: Canary
    saving: checkpoint.Saving
    num_optimizer_steps: int
    values: Values | None
    """Values of adapter and optimizer, if they are cached."""


def train(job: TrainJob, inputs: Inputs, phases: Phases, session: TrainerSession) -> None:
    """Run one job, on all ranks together. Writes nothing before the step has passed its checks."""
    net, place = session.setup(job, inputs.architecture, phases)
    learnt = _learn(job, inputs, phases, session, net, place)
    with phases.measured("export"):
        peak_gib = _peak_memory_gib(place)
        if place.rank == 0:
            learnt.saving.write_json(CANARY, learnt.canary.model_dump())
        session.release_device()  # while the files are written
        written = learnt.saving.finished()
    if place.rank == 0:
        result = TrainResult(
            adapter_version=job.adapter_version + 1,
            num_optimizer_steps=learnt.num_optimizer_steps,
            metrics=learnt.metrics,
            seconds=phases,
            began_at=phases.began_at,
            files=written,
            peak_memory_gib=peak_gib,
            microbatch_rows=learnt.largest.num_rows,
            microbatch_logits=learnt.largest.num_logits,
            versions=versions(TRAINER_PACKAGES) | job.switches | (devices.gpu_versions() if job.device == "cuda" else {}),
            backends=_backends(place, job, inputs.architecture),
        )
        # Perf: synced by the commit; here it waited 0.2 to 0.8 s behind a mixture's adapter of 5.9 GB (H200, docs/results/speed.md).
        files.write_note(job.result_path, result.model_dump())
    session.keep(job, learnt.values, written, learnt.num_optimizer_steps)
    dist.barrier()
    session.teardown()


def _learn(
    job: TrainJob, inputs: Inputs, phases: Phases, session: TrainerSession, net: nn.Module, place: ParallelContext
) -> Learnt:
    """Run the step. Device memory that is not cached is freed with the optimizer, and when the session sleeps."""
    a = inputs.architecture
    with phases.measured("adapter"):
        kept = session.take(job)
        shards = session.attach(job, a)
        adam = optimizer.build(shards, job.trainer)
        checkpoint.load(job, a, shards, adam, place, kept)
        on_host = session.host_state_of(job, shards, place)
        canary_probe = canary.CanaryProbe(net, inputs.batch, place)
    with phases.measured("train"):
        try:
            metrics, largest = train_step(net, shards, adam, inputs.batch, job.trainer, place, meanwhile=canary_probe.begin)
            session.check_experts()
        except (NotFinite, ExpertsChanged):
            session.teardown()
            raise
    with phases.measured("export"):
        if session.keeps:
            adapter_state.make_equal(adapter_state.values_of(shards, adam), shards, place)
        saving = checkpoint.save(job, shards, adam, on_host)
        canary_logprobs = canary_probe.end()  # while the files are written
        metrics |= throughput.figures(a, job.trainer.lora, inputs.batch, phases["train"], num_gpus=place.num_gpus)
    values = session.values_to_keep(shards, adam, on_host)
    return Learnt(metrics, largest, canary_logprobs, saving, optimizer.num_steps(adam), values)


def _backends(place: ParallelContext, job: TrainJob, a: Architecture) -> dict[str, str]:
    """Backends that computed the step. The adapters' matrix products are torch's own."""
    dtype = base_dtype(job.trainer, place.device)
    of_experts = {"experts_backend": grouped_gemm.described(place.device, dtype, a.experts, a.hidden_size)} if a.experts else {}
    return {
        "attention_backend": attention.described(place.device, dtype, a.head_dim),
        "lora_backend": "torch",
        "fused_kernels": "triton" if kernels.usable(torch.ones(1, device=place.device)) else "torch",
    } | of_experts


def _peak_memory_gib(place: ParallelContext) -> float:
    """Peak memory, the largest over ranks: reserved by the allocator on a GPU, else the process's resident set."""
    on_gpu = place.device.type == "cuda"
    num_bytes = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.tensor(num_bytes / 2**30, dtype=torch.float64, device=place.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()
