"""Muon, the optimizer whose update of a matrix is its momentum made orthogonal: half as many steps here as AdamW, and fewer.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/; scaled as in Moonlight (arXiv 2502.16982), so that a step is as
large as AdamW's. torch.optim.Muon does the same in bfloat16, which costs 20 times more than float32 on CPUs without units for it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2


class Update(NamedTuple):
    weight: nn.Parameter
    wide: Tensor
    """What is made orthogonal: no more rows than columns."""


class Muon(torch.optim.Optimizer):
    """For weight matrices of hidden layers; embeddings, norms and biases are AdamW's."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(list(matrices), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure, no loss
        for group in self.param_groups:
            for updates in self._by_shape(group["params"]):
                for update, wide in zip(updates, orthogonal(torch.stack([update.wide for update in updates])), strict=True):
                    size = group["lr"] * RMS_OF_ADAMW * max(wide.shape) ** 0.5
                    update.weight.add_(wide if wide.shape == update.weight.shape else wide.T, alpha=-size)

    def _by_shape(self, weights: list[nn.Parameter]) -> list[list[Update]]:
        """Those of one shape lie together: one product for all of them."""
        found: dict[torch.Size, list[Update]] = defaultdict(list)
        for weight in weights:
            assert weight.grad is not None and weight.ndim == 2
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            momentum.lerp_(weight.grad, 1 - MOMENTUM)
            ahead = weight.grad.lerp(momentum, MOMENTUM)
            wide = ahead if len(ahead) <= ahead.shape[1] else ahead.T
            found[wide.shape].append(Update(weight, wide))
        return list(found.values())


def orthogonal(wide: Tensor) -> Tensor:
    """[N, rows, columns], each matrix with its singular values brought near 1 (0.7 to 1.2), by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    x: Tensor = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x
