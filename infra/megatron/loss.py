"""Token log-probabilities from vocabulary-parallel logits, and the clipped policy loss on them.

The base model's logits are the largest tensor of a step: nothing here makes a float32 copy of all of them.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infra.config import TrainerConfig
from infra.megatron import kernels
from infra.megatron.batch import MicroBatch

# T tokens, V this rank's share of the vocabulary; nats throughout

TOKENS_PER_CHUNK = 1024
MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 tells nothing more, and would overflow."""


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of each distribution, both float32 [T].

    The vocabulary is cut evenly over the group's ranks (None: not at all); all of them get the same answer. The logits are
    divided by the temperature first: it is that distribution which was sampled from. Only the log-probabilities carry a gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits_TV, targets_T, temperature, group)  # type: ignore[no-untyped-call]  # torch
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Works through chunks of tokens in float32 and keeps, beside the logits, only one number a token for the way back."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:  # Any: torch types its context so
        first = dist.get_rank(group) * logits_TV.shape[1] if group else 0
        local_T, is_here_T = _local_targets(targets_T, first, logits_TV.shape[1])
        max_T = logits_TV.amax(-1).float() / temperature
        _reduce(max_T, dist.ReduceOp.MAX, group)
        sums_3T = logits_TV.new_empty((3, len(targets_T)), dtype=torch.float32)
        on_gpu = kernels.usable(logits_TV)
        if on_gpu:
            sums_3T[0], sums_3T[1] = kernels.softmax_sums(logits_TV, max_T, temperature)
            sums_3T[2] = (logits_TV.gather(1, local_T[:, None])[:, 0].float() / temperature - max_T) * is_here_T
        for rows in [] if on_gpu else _chunks(len(targets_T)):
            z_TV = logits_TV[rows].float() / temperature - max_T[rows, None]
            sums_3T[2, rows] = z_TV.gather(1, local_T[rows, None])[:, 0] * is_here_T[rows]
            weight_TV = z_TV.exp()
            sums_3T[0, rows] = weight_TV.sum(-1)
            sums_3T[1, rows] = weight_TV.mul_(z_TV).sum(-1)
        _reduce(sums_3T, dist.ReduceOp.SUM, group)
        sum_T, weighted_T, target_T = sums_3T
        log_sum_T = sum_T.log()
        entropies_T = log_sum_T - weighted_T / sum_T
        ctx.save_for_backward(logits_TV, local_T, is_here_T, max_T + log_sum_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies_T)
        return target_T - log_sum_T, entropies_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d logprob / d logits = (1 at the target - probabilities) / temperature."""
        logits_TV, local_T, is_here_T, log_norm_T = ctx.saved_tensors
        gradient_T = gradients[0] / ctx.temperature
        if kernels.usable(logits_TV):
            at_target_T = gradient_T * is_here_T
            result_TV = kernels.logprob_backward(logits_TV, log_norm_T, gradient_T, at_target_T, local_T, ctx.temperature)
            return result_TV, None, None, None
        result_TV = torch.empty_like(logits_TV)
        for rows in _chunks(len(gradient_T)):
            chunk_TV = (logits_TV[rows].float() / ctx.temperature - log_norm_T[rows, None]).exp_().mul_(-gradient_T[rows, None])
            chunk_TV.scatter_add_(1, local_T[rows, None], (gradient_T[rows] * is_here_T[rows])[:, None])
            result_TV[rows] = chunk_TV
        return result_TV, None, None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + TOKENS_PER_CHUNK) for start in range(0, num_tokens, TOKENS_PER_CHUNK)]


def _local_targets(targets_T: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's share of the vocabulary (any column where it is elsewhere), and whether it is here."""
    local_T = targets_T - first
    return local_T.clamp(0, size - 1), (local_T >= 0) & (local_T < size)


def _reduce(values: Tensor, how: Any, group: dist.ProcessGroup | None) -> None:  # Any: torch's operators have no type
    if group is not None:
        dist.all_reduce(values, how, group=group)


def policy_loss(
    log_ratios_T: Tensor, advantages_T: Tensor, weights_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective: the weighted sum of the tokens' losses, and which of them (bool [T]) are held by the clip."""
    ratios_T = log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_T = ratios_T.clamp(1 - clip_low, 1 + clip_high)
    gain_T, clipped_gain_T = ratios_T * advantages_T, clipped_T * advantages_T
    return -(torch.minimum(gain_T, clipped_gain_T) * weights_T).sum(), (clipped_gain_T < gain_T)


@dataclass
class Totals:
    """Sums over loss tokens from which every metric follows; adding ranks and micro-batches gives the same under every layout."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.float64))
    """loss, loss tokens, clipped, entropy, |d|, exp(d) - d - 1, w, w^2; d = trainer - rollout log-probability, w = exp(d)."""
    max_abs: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    """Largest |d|."""

    def add(self, loss: Tensor, is_clipped_T: Tensor, entropies_T: Tensor, log_ratios_T: Tensor, is_loss_T: Tensor) -> None:
        # Zeros in the place of other tokens, not a selection, whose size the GPU would have to be asked for.
        d, entropy = (torch.where(is_loss_T, x, 0.0).double() for x in (log_ratios_T, entropies_T))
        w = torch.where(is_loss_T, d.exp(), 0.0)
        sums = [loss.double(), is_loss_T.sum(), (is_clipped_T & is_loss_T).sum(), entropy.sum(), d.abs().sum()]
        sums += [(w - d - is_loss_T.double()).sum(), w.sum(), w.square().sum()]
        self.sums = self.sums.to(d.device) + torch.stack([value.double() for value in sums])
        # torch.maximum, not max: it keeps NaN, which must not get lost.
        self.max_abs = torch.maximum(self.max_abs.to(d.device), d.abs().amax())

    def reduce(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Over data-parallel ranks; afterwards the totals are those of the whole batch."""
        sums, max_abs = self.sums.to(device), self.max_abs.to(device)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(max_abs, dist.ReduceOp.MAX, group=group)
        self.sums, self.max_abs = sums.cpu(), max_abs.cpu()

    def metrics(self) -> dict[str, float]:
        loss, count, clipped, entropy, abs_d, k3, w, w_squared = self.sums.tolist()
        return {
            "train/loss": loss,
            "train/clip_frac": clipped / count,
            "train/entropy": entropy / count,
            "mismatch/mean_abs_logprob_diff": abs_d / count,
            "mismatch/max_abs_logprob_diff": self.max_abs.item(),
            "mismatch/kl_k3": k3 / count,
            "mismatch/ess": w * w / (count * w_squared) if w_squared else math.nan,
        }


def backward_microbatch(
    logits_TV: Tensor, micro: MicroBatch, totals: Totals, t: TrainerConfig, *, temperature: float, group: Any
) -> Tensor:
    """Add this micro-batch's gradients and sums; returns its share of the loss, which the GPU may not have computed yet."""
    logprobs_T, entropies_T = token_logprobs(logits_TV, micro.targets, temperature=temperature, group=group)
    # Bypass mode: the old policy is the one that sampled, so the clip acts on trainer-engine mismatch too.
    log_ratios_T = torch.where(micro.is_loss, logprobs_T - micro.rollout_logprobs, 0.0)
    loss, is_clipped_T = policy_loss(log_ratios_T, micro.advantages, micro.weights, clip_low=t.clip_low, clip_high=t.clip_high)
    loss.backward()  # type: ignore[no-untyped-call]  # torch
    totals.add(loss.detach(), is_clipped_T, entropies_T, log_ratios_T.detach(), micro.is_loss)
    return loss.detach()
