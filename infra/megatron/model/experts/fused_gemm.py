"""Products of rows with the matrices of their experts that are added to other rows at once: quack's kernel, on a Hopper GPU.

https://github.com/Dao-AILab/quack, quack/gemm_interface.py
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infra.megatron.model import kernel_packages

QUACK = "quack-kernels"
ALIGNMENT = 8
"""The kernel reads 16 bytes at once."""
CHECKED_ROWS = (5, 0, 300, 130)
"""Of each expert, in the comparison with torch."""


def computes(device: torch.device, dtype: torch.dtype, num_inputs: int, num_outputs: int) -> bool:
    """Whether quack's kernel computes products of matrices of this size."""
    is_aligned = num_inputs % ALIGNMENT == num_outputs % ALIGNMENT == 0
    return device.type == "cuda" and dtype is torch.bfloat16 and is_aligned and _gemm_add() is not None


@cache
def _gemm_add() -> Callable[..., Any] | None:
    return kernel_packages.function_of(QUACK, "quack.gemm_interface", "gemm_add")


# Perf: experts of a layer, forward 3.22 -> 2.71 ms (13,824 tokens, rank 8, 30B-A3B, H200, docs/results/speed.md).
def add_products(y_NO: Tensor, x_NI: Tensor, weight_EIO: Tensor, bounds: Tensor) -> Tensor:
    """Add to each row of y the row of x times the matrix of its expert, in place, rounded once. bounds: ends_E after a 0."""
    function = _gemm_add()
    assert function is not None
    result: Tensor = function(x_NI, weight_EIO, y_NO, out=y_NO, cu_seqlens_m=bounds, tuned=False)
    return result


def check(device: torch.device, dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    """Compare the kernel, where it is to be used, with torch in float32. Takes a few milliseconds, and 2 s where it has to be compiled first.

    Raises infra.megatron.model.kernel_packages.UnusableKernel if they are further apart than rounding.
    """
    if not computes(device, dtype, num_inputs, num_outputs):
        return
    num_rows = torch.tensor(CHECKED_ROWS)
    bounds = F.pad(num_rows.cumsum(0), (1, 0)).to(device, torch.int32)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    x, y = normal(sum(CHECKED_ROWS), num_inputs), normal(sum(CHECKED_ROWS), num_outputs)
    weight = normal(len(num_rows), num_outputs, num_inputs)
    parts = zip(torch.split(x.float(), list(CHECKED_ROWS)), weight.float(), strict=True)
    expected = y.float() + torch.cat([F.linear(rows, matrix) for rows, matrix in parts])
    found = add_products(y.clone(), x, weight.mT, bounds)
    kernel_packages.compare(QUACK, "the experts' products", ["the sum"], [found], [expected])
