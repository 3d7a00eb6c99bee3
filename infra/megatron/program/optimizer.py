"""AdamW on the adapter's shards: gradients summed over ranks, one global norm, clipping, the step."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from infra.config import TrainerConfig
from infra.megatron.lora.layers import Shard
from infra.megatron.model.parallel import ParallelContext, sum_over
from infra.megatron.protocol.optimizer_files import MOMENTS


def build(shards: list[Shard], t: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW over the shards, with the settings of the trainer's section and no state."""
    return torch.optim.AdamW(
        [shard.parameter for shard in shards],
        lr=t.learning_rate,
        betas=(t.adam_beta1, t.adam_beta2),
        eps=t.adam_eps,
        weight_decay=t.weight_decay,
    )


def num_steps(optimizer: torch.optim.AdamW) -> int:
    """Number of steps taken so far, including those of earlier jobs."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def learning_rate(t: TrainerConfig, step: int) -> float:
    """Learning rate of a step that follows `step` others.

    Warm-up: learning_rate (step + 1) / lr_warmup_steps. Cosine, from the warm-up to num_schedule_steps, then constant at the minimum:
    learning_rate (m + (1 - m) (1 + cos(pi x)) / 2) with m = min_lr_ratio and x the fraction of the decay.
    """
    if step < t.lr_warmup_steps:
        return t.learning_rate * (step + 1) / t.lr_warmup_steps
    if t.lr_scheduler_type == "constant":
        return t.learning_rate
    assert t.num_schedule_steps
    x = min(1.0, (step - t.lr_warmup_steps) / (t.num_schedule_steps - t.lr_warmup_steps))
    return t.learning_rate * (t.min_lr_ratio + (1 - t.min_lr_ratio) * (1 + math.cos(math.pi * x)) / 2)


def set_learning_rate(optimizer: torch.optim.AdamW, t: TrainerConfig, step: int) -> float:
    """Set the learning rate of the step that follows `step` others, and return it."""
    rate = learning_rate(t, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def moments(optimizer: torch.optim.AdamW, shards: list[Shard], which: str) -> list[Tensor]:
    """Return one of Adam's moments of each shard. which: exp_avg or exp_avg_sq."""
    return [optimizer.state[shard.parameter][which] for shard in shards]


def restore(optimizer: torch.optim.AdamW, shards: list[Shard], values: dict[str, list[Tensor]], num_steps: int) -> None:
    """Restore the optimizer's state after num_steps steps. values holds both moments of each shard."""
    for i, shard in enumerate(shards):
        optimizer.state[shard.parameter] = {"step": torch.tensor(float(num_steps))} | {
            which: values[which][i] for which in MOMENTS
        }


def reduce_gradients(shards: list[Shard], layout: ParallelContext) -> None:
    """Sum each shard's gradient over the ranks, so that it covers the whole batch. A rank without micro-batches contributes zeros."""
    for shard in shards:
        if shard.parameter.grad is None:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
    sum_over([_gradient(s) for s in shards if s.sums_over_tp], layout.tp_group)
    sum_over([_gradient(s) for s in shards if not s.is_expert], layout.dp_group)
    sum_over([_gradient(s) for s in shards if s.is_expert], layout.expert_dp_group)


def gradient_norm(shards: list[Shard], layout: ParallelContext) -> float:
    """L2 norm over the whole adapter: shards are summed, replicated parameters are counted once."""
    dense = torch.zeros((), dtype=torch.float64, device=layout.device)
    experts = torch.zeros_like(dense)
    for shard in shards:
        square = _gradient(shard).double().square().sum()
        if shard.is_expert:
            experts += square
        elif shard.cut_dim is not None or layout.tp_rank == 0:
            dense += square
    dist.all_reduce(dense, group=layout.tp_group)
    dist.all_reduce(experts, group=layout.ep_group)
    return (dense + experts).sqrt().item()


def clip_gradients(shards: list[Shard], norm: float, max_norm: float) -> None:
    """Scale all gradients, in place, so that their norm is max_norm at most. norm: of `gradient_norm`."""
    if norm > max_norm:
        for shard in shards:
            _gradient(shard).mul_(max_norm / norm)


def _gradient(shard: Shard) -> Tensor:
    assert shard.parameter.grad is not None
    return shard.parameter.grad
