"""Rotary positions of packed sequences: one table lookup per micro-batch.

megatron-core's own loops over the sequences in Python and waits for the GPU, in every layer, for queries and for keys.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from infra.megatron.model import kernels
from infra.megatron.model.copies import Copies
from infra.models.architecture import Llama3Rope

# T tokens of all packed sequences, H heads, D of one head


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """Data of a micro-batch for every layer. megatron-core passes it unchanged to the attention."""

    cos: Tensor | None = None
    """[T, 1, D] of each token's position in its sequence, in the model's type, as sin."""
    sin: Tensor | None = None
    copies: Copies | None = None
    """Rows whose keys and values each sequence attends to; None: its own rows."""


class Rotary(nn.Module):
    """Positions -> cosines and sines, by the numbers of megatron-core's RotaryEmbedding and, scaled, of Hugging Face's."""

    def __init__(
        self, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device, scaling: Llama3Rope | None = None
    ) -> None:
        super().__init__()
        self.dtype = dtype
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.frequencies = 1.0 / (theta**exponents)
        if scaling:
            self.frequencies = stretched(self.frequencies, scaling)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        half_TD = torch.outer(positions_T.float(), self.frequencies)
        angles_T1D = torch.cat((half_TD, half_TD), -1)[:, None]
        return angles_T1D.cos().to(self.dtype), angles_T1D.sin().to(self.dtype)


def stretched(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's: unchanged where the original context holds high_freq_factor turns or more, divided by factor where it holds
    low_freq_factor or fewer, between them a mean of both by the number of turns (transformers, modeling_rope_utils)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    unchanged = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, unchanged.clamp(0, 1))


def rotate(x_THD: Tensor, packed: Any) -> Tensor:  # Any: megatron-core has no types
    """[T, H, D] -> [T, H, D]: each row rotated to its position. packed: has the table of the micro-batch, cos and sin, [T, 1, D]."""
    if kernels.usable(x_THD):
        return _Rotate.apply(x_THD, packed.cos, packed.sin)  # type: ignore[no-untyped-call, no-any-return]  # torch
    first, second = x_THD.chunk(2, -1)
    rotated: Tensor = x_THD * packed.cos + torch.cat((-second, first), -1) * packed.sin
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(x_THD, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return kernels.rotate(gradients[0], cos, sin, -1.0), None, None
