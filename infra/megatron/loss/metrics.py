"""Sums over loss tokens from which every metric is computed. Summing micro-batches, ranks and mini-batches gives equal results in all layouts."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from infra.megatron.loss.objectives import ratios

NAMES = (
    *("loss", "tokens", "clipped", "entropy", "ratio", "ppo_kl", "kl_ref", "weight", "outside"),
    *("compared", "abs_d", "k3", "w", "w_squared"),
)
"""The last five describe d = trainer's - engine's log-prob, before the first optimizer step; w = exp(d)."""


@dataclass(frozen=True)
class Terms:
    """Terms of one micro-batch, one value per loss token; None where not requested."""

    is_clipped_T: Tensor
    entropies_T: Tensor
    log_ratios_T: Tensor
    mismatch_T: Tensor | None
    """d, as above"""
    kl_T: Tensor | None = None
    weights_T: Tensor | None = None
    is_outside_T: Tensor | None = None


@dataclass
class Totals:
    sums: Tensor = field(default_factory=lambda: torch.zeros(len(NAMES), dtype=torch.float64))
    max_abs: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    """Largest |d|."""
    num_minibatches: int = 1

    def add(self, loss: Tensor, terms: Terms) -> None:
        nothing = torch.zeros((), dtype=torch.float64, device=loss.device)

        def wide(values_T: Tensor | None) -> Tensor:
            return nothing if values_T is None else values_T.double()

        d, log_ratios_T = wide(terms.mismatch_T), wide(terms.log_ratios_T)
        is_compared = nothing if terms.mismatch_T is None else torch.ones_like(d)
        w = d.exp() * is_compared
        sums = {
            "loss": loss.double(),
            "tokens": torch.ones_like(log_ratios_T).sum(),
            "clipped": wide(terms.is_clipped_T).sum(),
            "entropy": wide(terms.entropies_T).sum(),
            "ratio": ratios(log_ratios_T).sum(),
            "ppo_kl": -log_ratios_T.sum(),
            "kl_ref": wide(terms.kl_T).sum(),
            "weight": wide(terms.weights_T).sum(),
            "outside": wide(terms.is_outside_T).sum(),
            "compared": is_compared.sum(),
            "abs_d": d.abs().sum(),
            "k3": (w - d - is_compared).sum(),
            "w": w.sum(),
            "w_squared": w.square().sum(),
        }
        self.sums = self.sums.to(loss.device) + torch.stack([sums[name].detach().double() for name in NAMES])
        # torch.maximum, not max: it propagates NaN, which must not get lost.
        self.max_abs = torch.maximum(self.max_abs.to(loss.device), torch.cat([nothing[None], d.abs().view(-1)]).amax())

    def reduce(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Reduce over data-parallel ranks. Afterwards the totals cover the whole mini-batch."""
        sums, max_abs = self.sums.to(device), self.max_abs.to(device)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(max_abs, dist.ReduceOp.MAX, group=group)
        self.sums, self.max_abs = sums.cpu(), max_abs.cpu()

    def __add__(self, other: "Totals") -> "Totals":
        """Combine the totals of two mini-batches: losses are averaged, everything else is over the tokens of both."""
        return Totals(
            self.sums + other.sums, torch.maximum(self.max_abs, other.max_abs), self.num_minibatches + other.num_minibatches
        )

    def metrics(self, *, has_reference: bool = False, is_corrected: bool = False) -> dict[str, float]:
        of = dict(zip(NAMES, self.sums.tolist(), strict=True))
        count, compared = of["tokens"], of["compared"]
        metrics = {
            "train/loss": of["loss"] / self.num_minibatches,
            "train/clip_frac": of["clipped"] / count,
            "train/entropy": of["entropy"] / count,
            "train/ratio_mean": of["ratio"] / count,
            "train/ppo_kl": of["ppo_kl"] / count,
        }
        if has_reference:
            metrics["train/kl_ref"] = of["kl_ref"] / count
        if is_corrected:
            metrics |= {"mismatch/weight_mean": of["weight"] / count, "mismatch/out_of_band_frac": of["outside"] / count}
        if compared:
            metrics |= {
                "mismatch/mean_abs_logprob_diff": of["abs_d"] / compared,
                "mismatch/max_abs_logprob_diff": self.max_abs.item(),
                "mismatch/kl_k3": of["k3"] / compared,
                "mismatch/ess": of["w"] ** 2 / (compared * of["w_squared"]) if of["w_squared"] else math.nan,
            }
        return metrics
