"""Rows of a tensor that are read several times: their copies, and the sum of the copies' gradients.

The backward pass of indexing would add with atomics on a GPU, in another order each time. Here the order is fixed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from infra.megatron.model import kernels

# T rows, N copies, W elements of a row


class Copies(NamedTuple):
    source_N: Tensor
    """Copy -> row."""
    order_N: Tensor
    """Copies sorted by row; the copies of a row in their own order."""
    starts: Tensor
    """[T + 1]; the copies of row t are order_N[starts[t] : starts[t + 1]]."""


def copies_of(source_N: Tensor, num_rows: int) -> Copies:
    """Return which rows the copies are of. source_N: int64 [N] on the host, copy -> row, below num_rows."""
    starts = torch.zeros(num_rows + 1, dtype=torch.int64)
    starts[1:] = source_N.bincount(minlength=num_rows).cumsum(0)
    # Perf: NumPy's stable sort merges rising runs, of which sources are made: 57,000 copies in 0.09 ms, torch's in 0.47 (one CPU core).
    order_N = torch.from_numpy(source_N.numpy().argsort(kind="stable"))
    return Copies(source_N, order_N, starts)


def gather(rows: Tensor, copies: Copies) -> Tensor:
    """[T, ...] -> [N, ...]."""
    copied: Tensor = _Gather.apply(rows, *copies)  # type: ignore[no-untyped-call]  # torch
    return copied


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source_N: Tensor, order_N: Tensor, starts: Tensor) -> Tensor:  # Any: torch types it so
        ctx.save_for_backward(order_N, starts)
        return rows.index_select(0, source_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return combine(gradients[0], *ctx.saved_tensors), None, None, None


def combine(copied: Tensor, order_N: Tensor, starts: Tensor) -> Tensor:
    """[N, ...] -> [T, ...]: the sum of each row's copies, in float32; 0 for a row without copies."""
    if kernels.usable(copied):
        flat = kernels.combine_copies(copied.reshape(len(copied), -1), order_N, starts)
        return flat.view(-1, *copied.shape[1:])
    counts = starts.diff()
    total = copied.new_zeros(len(counts), *copied.shape[1:], dtype=kernels.wide(copied.dtype))
    for i in range(int(counts.max())):
        rows = (counts > i).nonzero()[:, 0]
        total[rows] += copied[order_N[starts[rows] + i]]
    return total.to(copied.dtype)


def saved_as_rows(copies: Copies, *pairs: tuple[Tensor, Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Operations in this context that save the copies for their backward pass save the rows instead, and gather again. Pairs: copies, rows."""
    rows_of = {(copied.data_ptr(), copied.shape): rows.detach() for copied, rows in pairs}
    source_N = copies.source_N

    def pack(saved: Tensor) -> tuple[Tensor, bool]:
        rows = rows_of.get((saved.data_ptr(), saved.shape))
        return (saved, False) if rows is None else (rows, True)

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, is_compact = kept
        return tensor.index_select(0, source_N) if is_compact else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
