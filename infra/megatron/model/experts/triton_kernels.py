"""Triton kernels for the experts of a mixture on a GPU; see infra.megatron.model.kernels.

Rows are sorted by expert, as grouped_gemm.py has them. The products with an adapter's narrow matrices are passes over memory: each kernel reads the
wide rows once, and tokens in place of sorted copies of them where it can. IN_FLOAT32: Triton's interpreter takes the bits of bfloat16 for integers in
a product (3.6.0).
"""

import torch
from torch import Tensor

from infra.megatron.model.kernels import HAS_TRITON, ON_CPU, grid, power_of_2

TILE = 64
"""Rows of a tile whose first row's expert is given (`firsts`)."""
WIDEST = 32
"""Columns of narrow rows with which these kernels were measured. With more a grouped product is the better one."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weighted_swiglu(x, shares, y, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * width + column, gate * tl.sigmoid(gate) * up * tl.load(shares + row), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weighted_swiglu_backward(  # type: ignore[no-untyped-def]
        gradient, x, shares, result, to_shares, y, width: tl.constexpr, BLOCK: tl.constexpr
    ):
        row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        share, total = tl.load(shares + row), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + lanes
            inside = column < width
            g = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            total += g * silu * up
            tl.store(y + row * width + column, silu * up * share, mask=inside)
            to_gate = g * share * up * sigmoid * (1 + gate * (1 - sigmoid))
            tl.store(result + row * 2 * width + column, to_gate, mask=inside)
            tl.store(result + row * 2 * width + width + column, g * share * silu, mask=inside)
        tl.store(to_shares + row, tl.sum(total, 0))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _combine(rows, inverse, y, per_token: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, total = column < width, tl.zeros((BLOCK,), tl.float32)
        for i in range(per_token):
            row = tl.load(inverse + token * per_token + i)
            total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + token * width + column, total, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _wide_by_expert(  # type: ignore[no-untyped-def]
        y,
        narrow,
        matrices,
        ends,
        firsts,
        num_rows,
        expert_stride: tl.constexpr,
        rank_stride: tl.constexpr,
        column_stride: tl.constexpr,
        rank: tl.constexpr,
        width: tl.constexpr,
        ADDS: tl.constexpr,
        ROWS: tl.constexpr,
        RANK: tl.constexpr,
        COLUMNS: tl.constexpr,
        IN_FLOAT32: tl.constexpr,
    ):
        start = tl.program_id(0).to(tl.int64) * ROWS
        rows, lanes, columns = start + tl.arange(0, ROWS), tl.arange(0, RANK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(narrow + rows[:, None] * rank + lanes, mask=(rows < num_rows)[:, None] & (lanes < rank), other=0.0)
        within = (lanes < rank)[:, None] & (columns < width)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        # Rows of several experts may lie in one tile. Each matrix is multiplied with its own rows, and with zeros in place of the others.
        expert, begin, stop = tl.load(firsts + tl.program_id(0)).to(tl.int64), start, tl.minimum(start + ROWS, num_rows)
        while begin < stop:
            end = tl.load(ends + expert)
            place = matrices + expert * expert_stride + lanes[:, None] * rank_stride + columns * column_stride
            own, matrix = (rows >= begin) & (rows < end), tl.load(place, mask=within, other=0.0)
            mine = tl.where(own[:, None], x, 0.0).to(x.dtype)
            if IN_FLOAT32:
                mine, matrix = mine.to(tl.float32), matrix.to(tl.float32)
            total += tl.dot(mine, matrix, input_precision="ieee")
            begin = tl.maximum(begin, end.to(tl.int64))
            expert += 1
        target = y + rows[:, None] * width + columns
        inside = (rows < num_rows)[:, None] & (columns < width)
        if ADDS:
            total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _narrow_by_expert(  # type: ignore[no-untyped-def]
        x,
        source,
        matrices,
        ends,
        firsts,
        y,
        num_rows,
        scale,
        row_stride,
        expert_stride: tl.constexpr,
        rank_stride: tl.constexpr,
        column_stride: tl.constexpr,
        rank: tl.constexpr,
        width: tl.constexpr,
        OF_TOKENS: tl.constexpr,
        ROWS: tl.constexpr,
        RANK: tl.constexpr,
        COLUMNS: tl.constexpr,
        IN_FLOAT32: tl.constexpr,
    ):
        start = tl.program_id(0).to(tl.int64) * ROWS
        rows, lanes = start + tl.arange(0, ROWS), tl.arange(0, RANK)
        places = tl.load(source + rows, mask=rows < num_rows, other=0) if OF_TOKENS else rows
        total = tl.zeros((ROWS, RANK), tl.float32)
        # As in _wide_by_expert.
        expert, begin, stop = tl.load(firsts + tl.program_id(0)).to(tl.int64), start, tl.minimum(start + ROWS, num_rows)
        while begin < stop:
            end = tl.load(ends + expert)
            own = (rows >= begin) & (rows < end)
            for first in range(0, width, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                mine = tl.load(x + places[:, None] * row_stride + columns, mask=own[:, None] & (columns < width), other=0.0)
                place = matrices + expert * expert_stride + lanes * rank_stride + columns[:, None] * column_stride
                matrix = tl.load(place, mask=(columns < width)[:, None] & (lanes < rank), other=0.0)
                if IN_FLOAT32:
                    mine, matrix = mine.to(tl.float32), matrix.to(tl.float32)
                total = tl.dot(mine, matrix, total, input_precision="ieee")
            begin = tl.maximum(begin, end.to(tl.int64))
            expert += 1
        tl.store(y + rows[:, None] * rank + lanes, total * scale, mask=(rows < num_rows)[:, None] & (lanes < rank))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _over_rows(  # type: ignore[no-untyped-def]
        narrow,
        wide,
        source,
        ends,
        y,
        row_stride,
        expert_stride: tl.constexpr,
        rank_stride: tl.constexpr,
        column_stride: tl.constexpr,
        rank: tl.constexpr,
        width: tl.constexpr,
        OF_TOKENS: tl.constexpr,
        ROWS: tl.constexpr,
        RANK: tl.constexpr,
        COLUMNS: tl.constexpr,
        IN_FLOAT32: tl.constexpr,
    ):
        expert = tl.program_id(0).to(tl.int64)
        lanes, columns = tl.arange(0, RANK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        begin, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
        total = tl.zeros((RANK, COLUMNS), tl.float32)
        for start in range(begin, end, ROWS):
            rows = start + tl.arange(0, ROWS).to(tl.int64)
            inside = rows < end
            places = tl.load(source + rows, mask=inside, other=0) if OF_TOKENS else rows
            a = tl.load(narrow + rows[None, :] * rank + lanes[:, None], mask=inside[None, :] & (lanes < rank)[:, None], other=0.0)
            b = tl.load(wide + places[:, None] * row_stride + columns, mask=inside[:, None] & (columns < width), other=0.0)
            if IN_FLOAT32:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
        target = y + expert * expert_stride + lanes[:, None] * rank_stride + columns * column_stride
        tl.store(target, total, mask=(lanes < rank)[:, None] & (columns < width))


def weighted_swiglu(x: Tensor, shares: Tensor) -> Tensor:
    """[N, gate | up], float32 [N] -> shares * silu(gate) * up."""
    width = x.shape[1] // 2
    y = x.new_empty(len(x), width)
    _weighted_swiglu[grid(x, width, 1024)](x.contiguous(), shares.contiguous(), y, width, BLOCK=1024)
    return y


def weighted_swiglu_backward(gradient: Tensor, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of shares, and the activation: [N, gate | up], [N], [N, W]. gradient: [N, W]."""
    gradient, x, shares, width = gradient.contiguous(), x.contiguous(), shares.contiguous(), x.shape[1] // 2
    result, to_shares, y = torch.empty_like(x), torch.empty_like(shares), torch.empty_like(gradient)
    _weighted_swiglu_backward[(len(x),)](gradient, x, shares, result, to_shares, y, width, BLOCK=1024)
    return result, to_shares, y


def combine(rows: Tensor, inverse_TK: Tensor) -> Tensor:
    """[T, H]: the sum of each token's rows."""
    rows, width = rows.contiguous(), rows.shape[1]
    y = rows.new_empty(len(inverse_TK), width)
    _combine[grid(y, width, 1024)](rows, inverse_TK.contiguous(), y, inverse_TK.shape[1], width, BLOCK=1024)
    return y


def wide_by_expert(
    narrow_NR: Tensor, matrices_ERO: Tensor, ends_E: Tensor, firsts: Tensor, added_to: Tensor | None = None
) -> Tensor:
    """[N, O]: each narrow row times its expert's matrix. added_to: To whose rows they are added in place, rounded once."""
    (num_rows, rank), width = narrow_NR.shape, matrices_ERO.shape[2]
    y_NO = narrow_NR.new_empty(num_rows, width) if added_to is None else added_to
    assert y_NO.is_contiguous()
    _wide_by_expert[len(firsts), -(-width // 128)](
        *(y_NO, narrow_NR.contiguous(), matrices_ERO, ends_E, firsts, num_rows, *matrices_ERO.stride(), rank, width),
        *(added_to is not None, TILE, _lanes(rank), 128, ON_CPU),
    )
    return y_NO


def narrow_by_expert(
    x: Tensor, matrices_EIR: Tensor, ends_E: Tensor, firsts: Tensor, scale: float, source_N: Tensor | None = None
) -> Tensor:
    """[N, R]: scale * each row times its expert's matrix, rounded once.

    x: [N, I], the rows, or [T, I], the tokens, of which row n is source_N[n].
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width, rank = len(x) if source_N is None else len(source_N), x.shape[1], matrices_EIR.shape[2]
    y_NR = x.new_empty(num_rows, rank)
    expert_stride, column_stride, rank_stride = matrices_EIR.stride()
    _narrow_by_expert[(len(firsts),)](
        *(x, ends_E if source_N is None else source_N, matrices_EIR, ends_E, firsts, y_NR, num_rows, scale, x.stride(0)),
        *(expert_stride, rank_stride, column_stride, rank, width, source_N is not None, TILE, _lanes(rank), 128, ON_CPU),
        num_stages=_stages(x, rank, 4),
    )
    return y_NR


def over_rows(
    narrow_NR: Tensor, wide: Tensor, ends_E: Tensor, source_N: Tensor | None = None, *, is_wide_first: bool = False
) -> Tensor:
    """[E, R, W], or [E, W, R] if is_wide_first: for each expert the sum over its rows of the products of a narrow and a wide row; 0 without rows.

    wide: [N, W], the rows, or [T, W], the tokens, of which row n is source_N[n].
    """
    narrow_NR, wide = narrow_NR.contiguous(), wide if wide.stride(1) == 1 else wide.contiguous()
    rank, width = narrow_NR.shape[1], wide.shape[1]
    y_ERW = wide.new_empty(len(ends_E), width, rank).mT if is_wide_first else wide.new_empty(len(ends_E), rank, width)
    _over_rows[(len(ends_E), -(-width // 128))](
        *(narrow_NR, wide, ends_E if source_N is None else source_N, ends_E, y_ERW, wide.stride(0), *y_ERW.stride()),
        *(rank, width, source_N is not None, 64, _lanes(rank), 128, ON_CPU),
        num_stages=_stages(wide, rank, 3),
    )
    return y_ERW.mT if is_wide_first else y_ERW


def _lanes(rank: int) -> int:
    return max(16, power_of_2(rank))


def _stages(x: Tensor, rank: int, usual: int) -> int:
    """Return how many tiles are read ahead. Wider ones leave room for fewer."""
    return usual if x.element_size() == 2 and rank <= 16 else 2
