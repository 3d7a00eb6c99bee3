"""The matrix products of many experts at once, forward and backward, with LoRA next to frozen weights.

Rows are sorted by expert; the rows of expert e end before ends[e] (int32, on the device), and an expert may have none. In bfloat16 on
a Hopper GPU one kernel computes all experts and nothing waits for the host; elsewhere, and in float32, one product for each expert.
"""

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infra.megatron.model import kernels
from infra.megatron.model.experts import fused_gemm, triton_kernels
from infra.models.architecture import Experts

# T tokens, N rows (a token is a row for each of its K experts), E experts, H hidden, F of an expert, G = 2 F gate and up, R rank
# of all adapters of a fused layer, I inputs, O outputs

ALIGNMENT = 8
"""grouped_mm requires rows whose size is a multiple of 16 bytes."""


class Route(NamedTuple):
    """Which sorted row belongs to which token."""

    order_N: Tensor
    """Row -> token * K + which of the token's experts."""
    source_N: Tensor
    """Row -> token."""
    inverse_TK: Tensor
    """Token -> its rows."""
    ends_E: Tensor
    firsts: Tensor
    """Tile of rows -> the expert of its first row."""
    bounds: Tensor
    """ends_E after a 0."""


class Adapters(NamedTuple):
    """Adapters in the type of the rows. A pair is None if the layer has no adapter."""

    first: tuple[Tensor, Tensor] | None
    """A [E, R, H] and B [E, G, R]."""
    second: tuple[Tensor, Tensor] | None
    """A [E, R, F] and B [E, H, R]."""
    scale: float


def route(experts_TK: Tensor, num_experts: int) -> Route:
    """Sort by expert, and by token within an expert."""
    flat = experts_TK.flatten()
    found, order = flat.sort(stable=True)
    ends_E = torch.searchsorted(found, torch.arange(num_experts, device=flat.device), right=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    firsts = torch.searchsorted(ends_E, torch.arange(0, len(flat), triton_kernels.TILE, device=flat.device), right=True)
    bounds = F.pad(ends_E, (1, 0)).int()
    return Route(order, order // experts_TK.shape[1], inverse.view(experts_TK.shape), ends_E.int(), firsts, bounds)


def combine(y_NH: Tensor, inverse_TK: Tensor) -> Tensor:
    """[T, H]: the sum of each token's rows, in float32."""
    if kernels.usable(y_NH) and len(inverse_TK):
        return triton_kernels.combine(y_NH, inverse_TK)
    total: Tensor = y_NH[inverse_TK].sum(1, dtype=kernels.wide(y_NH.dtype))
    return total.to(y_NH.dtype)


def described(device: torch.device, dtype: torch.dtype, a: Experts, hidden_size: int) -> str:
    """Say what computes the frozen matrices of a layer with adapters."""
    is_grouped = device.type == "cuda" and dtype is torch.bfloat16 and _has_kernel()
    of_torch = "torch grouped_mm" if is_grouped else "torch, one expert after the other"
    if all(fused_gemm.computes(device, dtype, *sizes) for sizes in ((hidden_size, 2 * a.ffn_size), (a.ffn_size, hidden_size))):
        return f"{fused_gemm.QUACK} forward, {of_torch} backward"
    return of_torch


# Perf: 30B-A3B's first step at 13.1k tokens/s; with one expert after the other 614 (H200, docs/results/h200-trainer.md).
def by_expert(x_NI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """[N, O]: each row times the matrix of its expert."""
    if _is_grouped(x_NI, weight_EIO.shape[2]):
        y: Tensor = F.grouped_mm(x_NI, weight_EIO, offs=ends_E)
        return y
    y_NO = x_NI.new_empty(len(x_NI), weight_EIO.shape[2])
    for expert, (start, end) in enumerate(_spans(ends_E)):
        torch.mm(x_NI[start:end], weight_EIO[expert], out=y_NO[start:end])
    return y_NO


def with_adapter(x_NI: Tensor, weight_EIO: Tensor, narrow_NR: Tensor, matrices_ERO: Tensor, path: Route) -> Tensor:
    """[N, O]: each row times the matrix of its expert, and its narrow row times the adapter's matrix."""
    if kernels.usable(x_NI) and fused_gemm.computes(x_NI.device, x_NI.dtype, *weight_EIO.shape[1:]):
        y_NO = triton_kernels.wide_by_expert(narrow_NR, matrices_ERO, path.ends_E, path.firsts)
        return fused_gemm.add_products(y_NO, x_NI, weight_EIO, path.bounds)
    return add_by_expert(by_expert(x_NI, weight_EIO, path.ends_E), narrow_NR, matrices_ERO, path)


def add_by_expert(y_NO: Tensor, narrow_NR: Tensor, matrices_ERO: Tensor, path: Route) -> Tensor:
    """Add to each row of y the row of narrow times the matrix of its expert, in place: the product has as many columns as y, and is no tensor
    of its own where there are kernels."""
    if kernels.usable(y_NO):
        return triton_kernels.wide_by_expert(narrow_NR, matrices_ERO, path.ends_E, path.firsts, added_to=y_NO)
    return y_NO.add_(by_expert(narrow_NR, matrices_ERO, path.ends_E))


# Perf: a layer with adapters of rank 8 12.1 -> 11.1 ms, with quack's sums (30B-A3B, H200, docs/results/speed.md).
def narrow_by_expert(x: Tensor, matrices_EIR: Tensor, path: Route, scale: float, *, of_tokens: bool = False) -> Tensor:
    """[N, R]: scale * each row times the matrix of its expert. x: [N, I], or of_tokens: [T, I]."""
    if _is_narrow(x, matrices_EIR.shape[2]):
        source_N = path.source_N if of_tokens else None
        return triton_kernels.narrow_by_expert(x, matrices_EIR, path.ends_E, path.firsts, scale, source_N)
    return by_expert(x[path.source_N] if of_tokens else x, matrices_EIR, path.ends_E).mul_(scale)


def to_first(narrow_NR: Tensor, x: Tensor, path: Route, *, of_tokens: bool = False) -> Tensor:
    """[E, R, I], the gradient of A from those of A x. x: [N, I], or of_tokens: [T, I]."""
    if _is_narrow(x, narrow_NR.shape[1]):
        return triton_kernels.over_rows(narrow_NR, x, path.ends_E, path.source_N if of_tokens else None)
    return over_rows(narrow_NR, x[path.source_N] if of_tokens else x, path.ends_E)


def to_second(dy: Tensor, narrow_NR: Tensor, path: Route, *, of_tokens: bool = False) -> Tensor:
    """[E, O, R], the gradient of B. dy: [N, O], or of_tokens: [T, O]."""
    if _is_narrow(dy, narrow_NR.shape[1]):
        return triton_kernels.over_rows(narrow_NR, dy, path.ends_E, path.source_N if of_tokens else None, is_wide_first=True)
    return over_rows(dy[path.source_N] if of_tokens else dy, narrow_NR, path.ends_E)


def over_rows(a_NO: Tensor, b_NI: Tensor, ends_E: Tensor) -> Tensor:
    """[E, O, I]: for each expert the sum over its rows of the products of a row of a and a row of b; 0 without rows."""
    if _is_grouped(a_NO, b_NI.shape[1]):
        sums: Tensor = F.grouped_mm(a_NO.t(), b_NI, offs=ends_E)
        # The kernel's output for an expert without rows is undefined: noise, on some GPUs (pytorch/pytorch#172439).
        return sums.masked_fill_((ends_E.diff(prepend=ends_E.new_zeros(1)) == 0)[:, None, None], 0)
    sums = a_NO.new_empty(len(ends_E), a_NO.shape[1], b_NI.shape[1])
    for expert, (start, end) in enumerate(_spans(ends_E)):
        torch.mm(a_NO[start:end].t(), b_NI[start:end], out=sums[expert])
    return sums


def _is_narrow(x: Tensor, rank: int) -> bool:
    return kernels.usable(x) and rank <= triton_kernels.WIDEST


def _is_grouped(x: Tensor, width: int) -> bool:
    fits = x.shape[1] % ALIGNMENT == width % ALIGNMENT == 0 and len(x) > 0
    return fits and x.is_cuda and x.dtype is torch.bfloat16 and _has_kernel()


@cache
def _has_kernel() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def _spans(ends_E: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends_E.tolist()]))


def experts_output(
    x_TH: Tensor, share_N: Tensor, path: Route, gate_up_EGH: Tensor, down_EHF: Tensor, adapters: Adapters | None
) -> Tensor:
    """[T, H]: for each token the sum over its rows of share * down(silu(gate(x)) * up(x)); share is the router's, float32."""
    first, second, scale = adapters or Adapters(None, None, 1.0)
    matrices = (*(first or (None, None)), *(second or (None, None)))
    output: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]  # torch
        x_TH, share_N, path, gate_up_EGH, down_EHF, *matrices, scale
    )
    return output


class _Experts(torch.autograd.Function):
    """Saves the tokens, the output of the first layer and tensors of the adapters' width. The sorted rows and the activation are recomputed in
    the backward pass: they are as wide as everything that is saved, and cost a read and a write."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch types its context so
        x_TH: Tensor,
        share_N: Tensor,
        path: Route,
        gate_up_EGH: Tensor,
        down_EHF: Tensor,
        a1_ERH: Tensor | None,
        b1_EGR: Tensor | None,
        a2_ERF: Tensor | None,
        b2_EHR: Tensor | None,
        scale: float,
    ) -> Tensor:
        narrow1_NR = None if a1_ERH is None else narrow_by_expert(x_TH, a1_ERH.mT, path, scale, of_tokens=True)
        inner_NG = _linear(x_TH[path.source_N], gate_up_EGH, narrow1_NR, b1_EGR, path)
        act_NF = weighted_swiglu(inner_NG, share_N)
        narrow2_NR = None if a2_ERF is None else narrow_by_expert(act_NF, a2_ERF.mT, path, scale)
        y_NH = _linear(act_NF, down_EHF, narrow2_NR, b2_EHR, path)
        ctx.path, ctx.scale = path, scale
        ctx.save_for_backward(
            x_TH, share_N, gate_up_EGH, down_EHF, a1_ERH, b1_EGR, a2_ERF, b2_EHR, inner_NG, narrow1_NR, narrow2_NR
        )
        return combine(y_NH, path.inverse_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, share_N, gate_up_EGH, down_EHF, a1_ERH, b1_EGR, a2_ERF, b2_EHR, inner_NG, narrow1_NR, narrow2_NR = ctx.saved_tensors
        path, scale = ctx.path, ctx.scale
        dnarrow2_NR, db2_EHR = _to_narrow(gradients[0], narrow2_NR, b2_EHR, path, scale, of_tokens=True)
        dact_NF = _to_input(gradients[0][path.source_N], dnarrow2_NR, down_EHF, a2_ERF, path)
        dinner_NG, dshare_N, act_NF = weighted_swiglu_backward(dact_NF, inner_NG, share_N)
        da2_ERF = None if dnarrow2_NR is None else to_first(dnarrow2_NR, act_NF, path)
        del dact_NF, act_NF
        dnarrow1_NR, db1_EGR = _to_narrow(dinner_NG, narrow1_NR, b1_EGR, path, scale)
        da1_ERH = None if dnarrow1_NR is None else to_first(dnarrow1_NR, x_TH, path, of_tokens=True)
        dx_TH = None
        if ctx.needs_input_grad[0]:
            dx_TH = combine(_to_input(dinner_NG, dnarrow1_NR, gate_up_EGH, a1_ERH, path), path.inverse_TK)
        return dx_TH, dshare_N, None, None, None, da1_ERH, db1_EGR, da2_ERF, db2_EHR, None


def _linear(x_NI: Tensor, weight_EOI: Tensor, narrow_NR: Tensor | None, b_EOR: Tensor | None, path: Route) -> Tensor:
    if narrow_NR is None or b_EOR is None:
        return by_expert(x_NI, weight_EOI.mT, path.ends_E)
    return with_adapter(x_NI, weight_EOI.mT, narrow_NR, b_EOR.mT, path)


def _to_narrow(
    dy: Tensor, narrow_NR: Tensor | None, b_EOR: Tensor | None, path: Route, scale: float, *, of_tokens: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A x and of B. dy: [N, O], or of_tokens: [T, O]."""
    if narrow_NR is None or b_EOR is None:
        return None, None
    return narrow_by_expert(dy, b_EOR, path, scale, of_tokens=of_tokens), to_second(dy, narrow_NR, path, of_tokens=of_tokens)


def _to_input(dy_NO: Tensor, dnarrow_NR: Tensor | None, weight_EOI: Tensor, a_ERI: Tensor | None, path: Route) -> Tensor:
    # Not by quack: with the matrices of a backward pass its kernel with a sum is slower (docs/results/speed.md).
    dx_NI = by_expert(dy_NO, weight_EOI, path.ends_E)
    return dx_NI if dnarrow_NR is None or a_ERI is None else add_by_expert(dx_NI, dnarrow_NR, a_ERI, path)


def weighted_swiglu(inner_NG: Tensor, share_N: Tensor) -> Tensor:
    """[N, F]: share * silu(gate) * up, in float32 inside."""
    if kernels.usable(inner_NG):
        return triton_kernels.weighted_swiglu(inner_NG, share_N)
    gate, up = inner_NG.to(kernels.wide(inner_NG.dtype)).chunk(2, -1)
    return (F.silu(gate) * up * share_N[:, None]).to(inner_NG.dtype)


def weighted_swiglu_backward(dact_NF: Tensor, inner_NG: Tensor, share_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of inner and share, and the recomputed activation."""
    if kernels.usable(inner_NG):
        return triton_kernels.weighted_swiglu_backward(dact_NF, inner_NG, share_N)
    wide, share = kernels.wide(inner_NG.dtype), share_N[:, None]
    (gate, up), gradient = inner_NG.to(wide).chunk(2, -1), dact_NF.to(wide)
    silu = F.silu(gate)
    to_gate = torch.ops.aten.silu_backward(gradient * share * up, gate)
    dinner_NG = torch.cat((to_gate, gradient * share * silu), -1).to(inner_NG.dtype)
    return dinner_NG, (gradient * silu * up).sum(-1), (silu * up * share).to(inner_NG.dtype)
