"""Norms and activation, which replace megatron-core's in its layer spec.

Hidden states are normed by torch, each head of queries and keys by a Triton kernel of ours. The activation is SwiGLU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.megatron.model import kernels

# T rows, H heads, D of one head


class SwiGLU(nn.Module):
    """[..., gate | up] -> silu(gate) * up; saves only its input. The constructor is called as megatron-core's activation functions are."""

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


class RMSNorm(nn.Module):
    """megatron-core's own refuses sequence parallelism; but a norm is per token, and our weights are frozen."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)  # float32 inside


class HeadNorm(RMSNorm):
    """Norm of each head of queries or keys."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, 1, H, D] -> the same."""
        if not kernels.usable(x) or self.weight.requires_grad:  # the kernel gives the weight no gradient
            return super().forward(x)
        y: Tensor = _HeadNorm.apply(x.flatten(0, -3), self.weight, self.eps)  # type: ignore[no-untyped-call]  # torch
        return y.view(x.shape)


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, weight: Tensor, eps: float) -> Tensor:  # Any: torch types its context so
        ctx.save_for_backward(x_THD, weight)
        ctx.eps = eps
        return head_norm(x_THD, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x_THD, weight = ctx.saved_tensors
        return head_norm_backward(gradients[0], x_THD, weight, ctx.eps), None, None


if kernels.HAS_TRITON:
    import triton
    import triton.language as tl

    # Perf: norms 10.2 -> 4.1 ms of 194 a micro-batch; torch's copies heads that do not lie beside each other (12 layers of 30B-A3B, H200,
    # docs/results/speed.md).
    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _head_norm(  # type: ignore[no-untyped-def]
        x,
        weight,
        y,
        token_stride,
        head_stride,
        eps,
        heads: tl.constexpr,
        width: tl.constexpr,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        token, lanes, rows = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)[None, :], tl.arange(0, HEADS)[:, None]
        inside = (lanes < width) & (rows < heads)
        value = tl.load(x + token * token_stride + rows * head_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + lanes, mask=lanes < width, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        tl.store(y + (token * heads + rows) * width + lanes, value * scale * factor, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _head_norm_backward(  # type: ignore[no-untyped-def]
        gradient,
        x,
        weight,
        result,
        token_stride,
        head_stride,
        eps,
        heads: tl.constexpr,
        width: tl.constexpr,
        HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        token, lanes, rows = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)[None, :], tl.arange(0, HEADS)[:, None]
        inside, place = (lanes < width) & (rows < heads), (token * heads + rows) * width + lanes
        value = tl.load(x + token * token_stride + rows * head_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + lanes, mask=lanes < width, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        normed = value * scale
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(result + place, scale * (g - normed * (tl.sum(g * normed, 1) / width)[:, None]), mask=inside)


def head_norm(x_THD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, H, D]: the RMS norm of each head, times weight [D]."""
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    _head_norm[(len(x_THD),)](x_THD, weight, y_THD, x_THD.stride(0), x_THD.stride(1), eps, **_head_sizes(x_THD))
    return y_THD


def head_norm_backward(gradient: Tensor, x_THD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gradient of `head_norm`'s input. gradient: [T, H, D]; x_THD: its input."""
    gradient, x_THD = gradient.contiguous(), x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    result = torch.empty_like(gradient)
    strides = x_THD.stride(0), x_THD.stride(1)
    _head_norm_backward[(len(x_THD),)](gradient, x_THD, weight, result, *strides, eps, **_head_sizes(x_THD))
    return result


def _head_sizes(x_THD: Tensor) -> dict[str, int]:
    _, heads, width = x_THD.shape
    return {"heads": heads, "width": width, "HEADS": kernels.power_of_2(heads), "WIDTH": kernels.power_of_2(width)}
