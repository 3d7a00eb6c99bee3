"""The per-token objective: policy losses, KL estimators, rollout correction. Formulas and sources: docs/objectives.md.

Pure functions of small tensors, with one value for each loss token. No mean over the batch is taken here: denominators belong to the
whole mini-batch, see infra.megatron.loss.batch.token_weights.
"""

from typing import Literal

import torch
from torch import Tensor

from infra.config import CorrectionConfig, LossConfig

# T loss tokens; lengths: number of loss tokens of each sequence, in order; nats throughout

MAX_LOG_RATIO = 20.0
"""Clamp of log-ratios: a ratio beyond e^20 carries no more information, and could overflow."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""Clamp of GSPO's sequence log-ratio, from above only, as in verl."""
MAX_K3 = 10.0


def policy_losses(
    c: LossConfig, logprobs_T: Tensor, log_ratios_T: Tensor, advantages_T: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens are clipped (bool [T])."""
    match c.kind:
        case "ppo":
            return ppo(log_ratios_T, advantages_T, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip)
        case "gspo":
            return gspo(log_ratios_T, advantages_T, lengths, clip_low=c.clip_low, clip_high=c.clip_high)
        case "cispo":
            return cispo(logprobs_T, log_ratios_T, advantages_T, clip_low=c.clip_low, clip_high=c.clip_high)


def ppo(
    log_ratios_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A); where A < 0, at most -dual_clip A."""
    ratios_T = ratios(log_ratios_T)
    losses_T, is_clipped_T = _clipped(ratios_T, advantages_T, clip_low, clip_high)
    if dual_clip is None:
        return losses_T, is_clipped_T
    most_T = -dual_clip * advantages_T
    is_held_T = (advantages_T < 0) & (losses_T > most_T)
    return torch.where(is_held_T, most_T, losses_T), is_clipped_T | is_held_T


def gspo(
    log_ratios_T: Tensor, advantages_T: Tensor, lengths: list[int], *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's objective, with each token's ratio replaced by the geometric mean of its sequence's ratios.

    Each token carries its own share of the gradient (eq. 14 of the paper), so any aggregation can be applied.
    """
    means_T = sum_over_sequence(log_ratios_T.detach(), lengths) / sum_over_sequence(torch.ones_like(advantages_T), lengths)
    shared_T = (log_ratios_T - log_ratios_T.detach() + means_T).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return _clipped(shared_T.exp(), advantages_T, clip_low, clip_high)


def cispo(
    logprobs_T: Tensor, log_ratios_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-clip(r) A log pi, where clip(r) is a weight without gradient: no token loses its gradient."""
    ratios_T = ratios(log_ratios_T.detach())
    clipped_T = ratios_T.clamp(1 - clip_low, 1 + clip_high)
    return -clipped_T * advantages_T * logprobs_T, clipped_T != ratios_T


def ratios(log_ratios_T: Tensor) -> Tensor:
    """[T]: exp of the log-ratios, which are clamped to MAX_LOG_RATIO on both sides."""
    return log_ratios_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratios_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    gain_T, clipped_gain_T = ratios_T * advantages_T, ratios_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    return -torch.minimum(gain_T, clipped_gain_T), clipped_gain_T < gain_T


def kl_penalties(estimator: Literal["k1", "k2", "k3"], logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each token that the policy sampled."""
    d_T = logprobs_T - reference_T
    match estimator:
        case "k1":
            return d_T
        case "k2":
            return 0.5 * d_T.square()
        case "k3":
            back_T = (-d_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (back_T.exp() - back_T - 1).clamp(max=MAX_K3)


def correction_weights(c: CorrectionConfig, log_ratios_T: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Weight of each token's loss, and which tokens lie outside the band (bool [T]), from log(trainer's old / engine's probability).

    A token of weight 0 still counts in the denominator, as in verl.
    """
    if c.level == "sequence":
        log_ratios_T = sum_over_sequence(log_ratios_T, lengths)
    raw_T = ratios(log_ratios_T)
    is_high_T, is_low_T = raw_T > c.cap, raw_T < c.floor
    match c.kind:
        case "none":
            return torch.ones_like(raw_T), torch.zeros_like(is_high_T)
        case "tis":
            return raw_T.clamp(max=c.cap), is_high_T
        case "mis":
            return raw_T.masked_fill(is_high_T, 0.0), is_high_T
        case "icepop":
            return raw_T.masked_fill(is_high_T | is_low_T, 0.0), is_high_T | is_low_T


def sum_over_sequence(values_T: Tensor, lengths: list[int]) -> Tensor:
    """Give each token the sum over its sequence. One sum per sequence: on a GPU, the order of additions in index_add_ varies."""
    return torch.cat([values_T[:0], *(part.sum().expand(len(part)) for part in torch.split(values_T, lengths))])
