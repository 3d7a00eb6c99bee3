"""SwiGLU that saves only its input: [..., gate | up] -> silu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.megatron.model import kernels


class SwiGLU(nn.Module):
    """Replaces the activation function in megatron-core's layer spec, hence the signature of the constructor."""

    def __init__(self, config: Any = None) -> None:  # Any: megatron-core has no types
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]  # torch
        return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.save_for_backward(x)
        if kernels.usable(x):
            return kernels.swiglu(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), gradient = ctx.saved_tensors, gradients[0]
        if kernels.usable(x):
            return kernels.swiglu_backward(gradient, x)
        gate, up = x.chunk(2, -1)
        return torch.cat((torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)), -1)
