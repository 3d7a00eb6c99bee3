"""This rank's part of the work: process groups, and sums over them."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from infra.megatron.model import cpu_patches
from infra.megatron.protocol.job import MEETING_FILE, TrainJob

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelContext:
    device: torch.device
    rank: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    token_multiple: int
    """Sequence parallelism splits the tokens of a micro-batch evenly over tensor-parallel ranks."""
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    """Ranks that hold the same adapters of attention and dense layers and see different sequences."""
    ep_group: dist.ProcessGroup
    expert_dp_group: dist.ProcessGroup
    """Ranks that hold the same experts' adapters."""

    @property
    def num_gpus(self) -> int:
        return dist.get_world_size() if self.device.type == "cuda" else 0


def start(job: TrainJob) -> ParallelContext:
    """Join the other ranks, or run alone without torchrun."""
    torch.set_num_threads(job.num_threads)
    if job.device == "cpu":
        cpu_patches.install()
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
        torch.cuda.set_device(device)
    _join(backend, timedelta(seconds=job.trainer.timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.trainer.tensor_parallel,
        expert_model_parallel_size=job.trainer.expert_parallel,
        expert_tensor_parallel_size=1,
    )
    if job.device == "cuda":
        model_parallel_cuda_manual_seed(job.seed)
    return _layout(device, job)


def stop() -> None:
    """End the process groups that `start` made."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _join(backend: str, timeout: timedelta) -> None:
    """Join through a file if all ranks are on one node: a TCP store would listen on all interfaces, without a password."""
    if meeting := os.environ.get(MEETING_FILE):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=timeout, init_method=f"file://{meeting}", rank=rank, world_size=size)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def _layout(device: torch.device, job: TrainJob) -> ParallelContext:
    return ParallelContext(
        device=device,
        rank=dist.get_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        token_multiple=job.trainer.tensor_parallel if job.trainer.sequence_parallel else 1,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        expert_dp_group=parallel_state.get_expert_data_parallel_group(),
    )


def sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the group's ranks; in place, in one message."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def copy_from_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by that of the group's first rank, bit for bit; in place, in one message."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def told_by_first(what: T) -> T:
    """Broadcast rank 0's value to all ranks. Collective."""
    said = [what]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(said)
    return said[0]


def gather(tensors: list[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Gather the same list from every rank of the group, in rank order, in one message. Shapes must be equal over ranks."""
    if not tensors or dist.get_world_size(group) == 1:
        return [tensors] * dist.get_world_size(group)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, flat, group=group)
    sizes = [tensor.numel() for tensor in tensors]
    return [[x.view_as(tensor) for x, tensor in zip(torch.split(part, sizes), tensors, strict=True)] for part in parts]
