"""Triton kernels for a GPU that replace many passes of plain PyTorch over a step's largest tensors by one.

Each has a plain equivalent next to its caller. They compute in float32, for tensors of any type. Triton caches compiled kernels on disk.
`torch.compile` would work too, but takes longer to start than a short step takes to run.
"""

import importlib.util
import os

import torch
from torch import Tensor

ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter: slow, for tests of these kernels without a GPU."""
HAS_TRITON = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or ON_CPU)
_found = HAS_TRITON


# Perf: with rotary.py and the products of lora/layers.py, 7B training 10.5k -> 18.2k tokens/s (H200, docs/history/log.md).
def usable(x: Tensor) -> bool:
    """Whether these kernels can compute on a tensor: it is not empty, and on a GPU with Triton."""
    return _found and (x.is_cuda or ON_CPU) and x.numel() > 0


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the plain equivalents compute: float32, or the tensor's own if that is wider."""
    return torch.promote_types(dtype, torch.float32)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # triton has no types
    def _swiglu(x, y, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # triton reads it, not Python
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _swiglu_backward(gradient, x, result, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        tl.store(result + row * 2 * width + column, g * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
        tl.store(result + row * 2 * width + width + column, g * gate * sigmoid, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _combine_copies(rows, order, starts, y, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        target, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, total = column < width, tl.zeros((BLOCK,), tl.float32)
        for i in range(tl.load(starts + target), tl.load(starts + target + 1)):
            row = tl.load(order + i)
            total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + target * width + column, total, mask=inside)

    # Perf: maxima and sums in one pass: kernels of logits 12.5 -> 10.5 ms for 32,768 tokens (0.5B, H100, docs/results/speed.md).
    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _softmax_sums(logits, maxima, sums, weighted, temperature, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        # Each lane has a maximum of its own so far, to which its sums refer.
        maximum = tl.full((BLOCK,), -1e30, tl.float32)
        total, total_weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + lanes < width
            z = tl.load(logits + row * width + start + lanes, mask=inside, other=0.0).to(tl.float32) / temperature
            higher = tl.where(inside, tl.maximum(maximum, z), maximum)
            lower = maximum - higher
            weight = tl.where(inside, tl.exp(z - higher), 0.0)
            total_weighted = tl.exp(lower) * (total_weighted + lower * total) + weight * (z - higher)
            total = tl.exp(lower) * total + weight
            maximum = higher
        highest = tl.max(maximum, 0)
        lower = maximum - highest
        tl.store(maxima + row, highest)
        tl.store(sums + row, tl.sum(tl.exp(lower) * total, 0))
        tl.store(weighted + row, tl.sum(tl.exp(lower) * (total_weighted + lower * total), 0))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _logprob_backward(  # type: ignore[no-untyped-def]
        logits, log_norms, gradient, at_target, targets, result, temperature, width: tl.constexpr, BLOCK: tl.constexpr
    ):
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        z = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32) / temperature
        value = -tl.load(gradient + row) * tl.exp(z - tl.load(log_norms + row))
        value += tl.where(column == tl.load(targets + row), tl.load(at_target + row), 0.0)
        tl.store(result + row * width + column, value, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _rotate(  # type: ignore[no-untyped-def]
        x,
        cos,
        sin,
        y,
        token_stride,
        head_stride,
        sign,
        heads: tl.constexpr,
        half: tl.constexpr,
        HEADS: tl.constexpr,
        HALF: tl.constexpr,
    ):
        token, lanes, rows = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
        inside = (lanes < half) & (rows < heads)
        source = x + token * token_stride + rows * head_stride + lanes
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + token * 2 * half + lanes, mask=lanes < half, other=0.0).to(tl.float32)
        s = tl.load(sin + token * 2 * half + lanes, mask=lanes < half, other=0.0).to(tl.float32) * sign
        target = y + (token * heads + rows) * 2 * half + lanes
        tl.store(target, first * c - second * s, mask=inside)
        tl.store(target + half, second * c + first * s, mask=inside)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate every head of a token by that token's angles, or back with sign -1. cos and sin are [T, 1, D], with equal halves."""
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    num_tokens, heads, width = x_THD.shape
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    sizes = {"heads": heads, "half": width // 2, "HEADS": power_of_2(heads), "HALF": power_of_2(width // 2)}
    _rotate[(num_tokens,)](x_THD, cos, sin, y_THD, x_THD.stride(0), x_THD.stride(1), sign, **sizes)
    return y_THD


def power_of_2(size: int) -> int:
    """Return the least power of 2 that is not below size."""
    return 1 << (size - 1).bit_length()


def swiglu(x: Tensor) -> Tensor:
    """[..., gate | up] -> [..., W]: silu(gate) * up, of the tensor's dtype."""
    x, width = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    _swiglu[grid(x, width, 1024)](x, y, width, BLOCK=1024)
    return y


def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `swiglu`'s input. gradient: [..., W]; x: [..., gate | up], its input. Returns [..., gate | up]."""
    gradient, x, width = gradient.contiguous(), x.contiguous(), x.shape[-1] // 2
    result = torch.empty_like(x)
    _swiglu_backward[grid(x, width, 1024)](gradient, x, result, width, BLOCK=1024)
    return result


def combine_copies(copied: Tensor, order_N: Tensor, starts: Tensor) -> Tensor:
    """[T, W]: the sum of each row's copies; see infra.megatron.model.copies."""
    copied, width = copied.contiguous(), copied.shape[1]
    y = copied.new_empty(len(starts) - 1, width)
    block = min(power_of_2(width), 1024)
    _combine_copies[grid(y, width, block)](copied, order_N, starts, y, width, BLOCK=block)
    return y


def softmax_sums(logits_TV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum of each row, and sum of exp(z) and of z * exp(z) over it, z = logits / temperature - the maximum; float32 [T]."""
    logits_TV = logits_TV.contiguous()
    max_T, sums_T, weighted_T = (torch.empty(len(logits_TV), dtype=torch.float32, device=logits_TV.device) for _ in range(3))
    sizes = (logits_TV.shape[1], 4096)
    _softmax_sums[(len(max_T),)](logits_TV, max_T, sums_T, weighted_T, temperature, *sizes, num_warps=8)
    return max_T, sums_T, weighted_T


def logprob_backward(
    logits_TV: Tensor, log_norm_T: Tensor, gradient_T: Tensor, at_target_T: Tensor, target_T: Tensor, temperature: float
) -> Tensor:
    """[T, V]: -gradient * softmax(logits / temperature), with at_target added in the target's column. log_norm_T: log of its denominator."""
    logits_TV, width = logits_TV.contiguous(), logits_TV.shape[1]
    result_TV = torch.empty_like(logits_TV)
    vectors = (x.contiguous() for x in (log_norm_T, gradient_T, at_target_T, target_T))
    _logprob_backward[grid(logits_TV, width, 4096)](logits_TV, *vectors, result_TV, temperature, width, BLOCK=4096, num_warps=8)
    return result_TV


def grid(x: Tensor, width: int, block: int) -> tuple[int, int]:
    """Return the programs of a kernel that computes a block of a row of x each."""
    return x.numel() // x.shape[-1], -(-width // block)
