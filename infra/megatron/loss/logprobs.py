"""Token log-probabilities from vocabulary-parallel logits, and the loss of a micro-batch on them.

The base model's logits are the largest tensor of a step, so nothing here makes a float32 copy of all of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infra.config import LossConfig
from infra.megatron.loss.metrics import Terms, Totals
from infra.megatron.loss.microbatch import MicroBatch
from infra.megatron.loss.objectives import correction_weights, kl_penalties, policy_losses
from infra.megatron.model import kernels

# T loss tokens, V this rank's share of the vocabulary; nats throughout

TOKENS_PER_CHUNK = 1024


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of each distribution, both float32 [T].

    The vocabulary is split evenly over the group's ranks (None: not split), and all ranks get the same result. The logits are
    divided by the temperature first, because samples were drawn from that distribution. Both results carry a gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits_TV, targets_T, temperature, group)  # type: ignore[no-untyped-call]  # torch
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Processes chunks of tokens in float32. For the backward pass it keeps the logits and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:  # Any: torch types its context so
        first = dist.get_rank(group) * logits_TV.shape[1] if group else 0
        local_T, is_here_T = _local_targets(targets_T, first, logits_TV.shape[1])
        wide = kernels.wide(logits_TV.dtype)
        sums_3T = logits_TV.new_empty((3, len(targets_T)), dtype=wide)
        on_gpu = kernels.usable(logits_TV)
        if on_gpu:
            own_T, sum_T, weighted_T = kernels.softmax_sums(logits_TV, temperature)
            max_T = own_T.clone()
            _reduce(max_T, dist.ReduceOp.MAX, group)
            lower_T = own_T - max_T  # 0 where the vocabulary is not split
            sums_3T[0], sums_3T[1] = lower_T.exp() * sum_T, lower_T.exp() * (weighted_T + lower_T * sum_T)
            sums_3T[2] = (logits_TV.gather(1, local_T[:, None])[:, 0].float() / temperature - max_T) * is_here_T
        else:
            max_T = logits_TV.amax(-1).to(wide) / temperature
            _reduce(max_T, dist.ReduceOp.MAX, group)
        for rows in [] if on_gpu else _chunks(len(targets_T)):
            z_TV = logits_TV[rows].to(wide) / temperature - max_T[rows, None]
            sums_3T[2, rows] = z_TV.gather(1, local_T[rows, None])[:, 0] * is_here_T[rows]
            weight_TV = z_TV.exp()
            sums_3T[0, rows] = weight_TV.sum(-1)
            sums_3T[1, rows] = weight_TV.mul_(z_TV).sum(-1)
        _reduce(sums_3T, dist.ReduceOp.SUM, group)
        sum_T, weighted_T, target_T = sums_3T
        log_sum_T = sum_T.log()
        entropies_T = log_sum_T - weighted_T / sum_T
        ctx.save_for_backward(logits_TV, local_T, is_here_T, max_T + log_sum_T, entropies_T)
        ctx.temperature = temperature
        # None, not zeros, for an output that is not in the loss: the entropy's gradient costs one more tensor.
        ctx.set_materialize_grads(False)
        return target_T - log_sum_T, entropies_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Gradients with respect to the logits, times the temperature. Log-prob: 1 at the target - p. Entropy: -p (log p + entropy)."""
        logits_TV, local_T, is_here_T, log_norm_T, entropies_T = ctx.saved_tensors
        of_logprob_T, of_entropy_T = (None if g is None else g / ctx.temperature for g in gradients)
        if of_logprob_T is None:
            of_logprob_T = torch.zeros_like(entropies_T)
        at_target_T = of_logprob_T * is_here_T
        if of_entropy_T is None and kernels.usable(logits_TV):
            result_TV = kernels.logprob_backward(logits_TV, log_norm_T, of_logprob_T, at_target_T, local_T, ctx.temperature)
            return result_TV, None, None, None
        result_TV = torch.empty_like(logits_TV)
        for rows in _chunks(len(of_logprob_T)):
            logp_TV = logits_TV[rows].to(entropies_T.dtype) / ctx.temperature - log_norm_T[rows, None]
            factor_TV = of_logprob_T[rows, None]
            if of_entropy_T is not None:
                factor_TV = factor_TV + of_entropy_T[rows, None] * (logp_TV + entropies_T[rows, None])
            chunk_TV = logp_TV.exp_().mul_(-factor_TV)
            chunk_TV.scatter_add_(1, local_T[rows, None], at_target_T[rows, None])
            result_TV[rows] = chunk_TV
        return result_TV, None, None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + TOKENS_PER_CHUNK) for start in range(0, num_tokens, TOKENS_PER_CHUNK)]


def _local_targets(targets_T: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's share of the vocabulary, and whether the target is in it. Any column if it is not."""
    local_T = targets_T - first
    return local_T.clamp(0, size - 1), (local_T >= 0) & (local_T < size)


def _reduce(values: Tensor, how: Any, group: dist.ProcessGroup | None) -> None:  # Any: torch's operators have no type
    if group is not None and values.numel():
        dist.all_reduce(values, how, group=group)


def backward_microbatch(
    logits_TV: Tensor,
    micro: MicroBatch,
    totals: Totals,
    c: LossConfig,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
    is_untrained: bool = True,
) -> Tensor:
    """Add this micro-batch's gradients and sums. Returns its share of the mini-batch's loss, which the GPU may not have computed yet.

    is_untrained: No optimizer step was taken since sampling: the adapter is still the one that sampled.
    """
    logprobs_T, entropies_T = token_logprobs(logits_TV, micro.targets, temperature=temperature, group=group)
    total, terms = loss_of(micro, c, logprobs_T, entropies_T, is_untrained=is_untrained)
    total.backward()  # type: ignore[no-untyped-call]  # torch
    totals.add(total.detach(), terms)
    return total.detach()


def loss_of(
    micro: MicroBatch, c: LossConfig, logprobs_T: Tensor, entropies_T: Tensor, *, is_untrained: bool
) -> tuple[Tensor, Terms]:
    """Return the micro-batch's share of the mini-batch's loss, and the terms for the metrics."""
    old_T = _old_logprobs(micro, c, logprobs_T)
    log_ratios_T = logprobs_T - old_T
    losses_T, is_clipped_T = policy_losses(c, logprobs_T, log_ratios_T, micro.advantages, micro.lengths)
    is_decoupled = c.correction.mode == "decoupled"
    mismatch_T = ((old_T if is_decoupled else logprobs_T) - micro.rollout_logprobs).detach()
    factors_T = is_outside_T = kl_T = None
    if c.correction.kind != "none":
        factors_T, is_outside_T = correction_weights(c.correction, mismatch_T, micro.lengths)
        losses_T = losses_T * factors_T
    total = (losses_T * micro.weights).sum()
    if micro.reference_logprobs is not None:
        kl_T = kl_penalties(c.kl.estimator, logprobs_T, micro.reference_logprobs)
        if c.kl.where == "loss":
            total = total + c.kl.coefficient * (kl_T * micro.weights).sum()
    if c.entropy_bonus:
        total = total - c.entropy_bonus * (entropies_T * micro.weights).sum()
    return total, Terms(
        is_clipped_T=is_clipped_T,
        entropies_T=entropies_T,
        log_ratios_T=log_ratios_T,
        # In bypass mode a later mini-batch's difference would include the optimizer steps taken since.
        mismatch_T=mismatch_T if is_decoupled or is_untrained else None,
        kl_T=kl_T,
        weights_T=factors_T,
        is_outside_T=is_outside_T,
    )


def _old_logprobs(micro: MicroBatch, c: LossConfig, logprobs_T: Tensor) -> Tensor:
    """Log-probs of the policy in the denominator of the ratios."""
    if c.correction.mode == "bypass":
        return micro.rollout_logprobs
    # Not recorded means that no optimizer step was taken in between: the old policy is the current one.
    return logprobs_T.detach() if micro.old_logprobs is None else micro.old_logprobs
