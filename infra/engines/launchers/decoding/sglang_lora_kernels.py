"""Triton kernels for the two products of a LoRA adapter in SGLang, loaded by `sglang_lora_decoding.py` on a GPU.

    shrink    x A^T    [tokens, inputs] -> [tokens, slices x rank]; a slice for each matrix that reads the same x (queries, keys, values)
    expand    y + scaling x B^T, in place    [tokens, slices x rank] -> [tokens, outputs of all slices]

They compute what SGLang's own do (sglang 0.5.17, kernels/ops/gemm/{sgemm_lora_a,sgemm_lora_b,gate_up_lora_b,qkv_lora_b}.py), for batches in which
most tokens have one adapter. Its shrinking kernel has a program for each 16 tokens, which goes along all inputs: 32 programs for 512 tokens, while a
GPU has 132 processors. Here several programs share the inputs. Its expanding kernels write blocks of 16 x 64 numbers; here they are larger.

Runs in SGLang's own environment and imports nothing of ours.
"""

from typing import Any

import torch
import triton
import triton.language as tl

SHRINK = {"BLOCK_S": 32, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
EXPAND = {"BLOCK_S": 64, "BLOCK_N": 64, "num_warps": 4}
INPUTS_PER_PART, MAX_PARTS = 896, 8
"""Into how many parts the inputs of a shrinking product are cut: by their number alone, so that a token's sum does not depend on the batch."""
MAX_TILES = 1 << 16
_arrived: dict[torch.device, torch.Tensor] = {}


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator, unused-ignore]  # else compiled for 1, for multiples of 16, and for others
def _shrink(  # type: ignore[no-untyped-def]
    x,
    weights,
    output,
    partials,
    arrived,
    N,
    K,
    num_slices,
    num_tokens,
    x_stride,
    slot_stride,
    row_stride,
    output_stride,
    lengths,
    starts,
    slots,
    ranks,
    token_ids,
    PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    segment, columns = tl.program_id(2), tl.program_id(1)
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    slot = tl.load(slots + segment)
    length, N = tl.load(lengths + segment), tl.minimum(N, tl.load(ranks + slot) * num_slices)
    if (tile * BLOCK_S >= length) | (columns * BLOCK_N >= N):
        return
    s, n, k = tile * BLOCK_S + tl.arange(0, BLOCK_S), columns * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    places = tl.load(starts + segment) + s
    tokens = tl.load(token_ids + places, mask=s < length, other=0).to(tl.int64)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS)
    begin = part * blocks * BLOCK_K
    x_at = x + tokens[:, None] * x_stride + begin + k[None, :]
    w_at = weights + slot * slot_stride + n[None, :] * row_stride + begin + k[:, None]
    total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    for i in range(blocks):
        inside = k < K - begin - i * BLOCK_K
        a = tl.load(x_at, mask=(s[:, None] < length) & inside[None, :], other=0.0)
        b = tl.load(w_at, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        x_at += BLOCK_K
        w_at += BLOCK_K
    mask = (s[:, None] < length) & (n[None, :] < N)
    if PARTS > 1:  # the program that comes last adds up the parts, in their order: the same bits each time
        width = tl.num_programs(1) * BLOCK_N
        partial = partials + places[:, None] * width + n[None, :]
        tl.store(partial + part * num_tokens * width, total, mask=mask)
        tl.debug_barrier()
        count = arrived + (segment * tl.num_programs(0) + tile) * tl.num_programs(1) + columns
        if tl.atomic_add(count, 1, sem="acq_rel") < PARTS - 1:
            return
        tl.debug_barrier()
        total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
        for i in tl.static_range(PARTS):  # .cg: past the cache of this processor, which other programs do not write to
            total += tl.load(partial + i * num_tokens * width, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(count, 0)
    tl.store(output + tokens[:, None] * output_stride + n[None, :], total.to(output.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _expand(  # type: ignore[no-untyped-def]
    x,
    weights,
    output,
    K,
    first,
    others,
    x_stride,
    slot_stride,
    row_stride,
    output_stride,
    lengths,
    starts,
    slots,
    ranks,
    scalings,
    token_ids,
    IN_ORDER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Columns of the first slice, then those of the others, which are equally wide: no program is without work.
    segment, block = tl.program_id(2), tl.program_id(0)
    slot, begin = tl.load(slots + segment), tl.program_id(1) * BLOCK_S
    length, rank = tl.load(lengths + segment), tl.load(ranks + slot)
    if (rank == 0) | (begin >= length):
        return
    blocks_of_first, blocks_of_others = tl.cdiv(first, BLOCK_N), tl.cdiv(others, BLOCK_N)
    later = tl.maximum(block - blocks_of_first, 0)
    is_first = block < blocks_of_first
    slice = tl.where(is_first, 0, 1 + later // tl.maximum(blocks_of_others, 1))
    inside = tl.where(is_first, block, later % tl.maximum(blocks_of_others, 1)) * BLOCK_N + tl.arange(0, BLOCK_N)
    has = inside < tl.where(is_first, first, others)
    n = tl.where(is_first, 0, first) + tl.maximum(slice - 1, 0) * others + inside
    s, k, K = begin + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K), tl.minimum(K, rank)
    tokens = tl.load(starts + segment) + s
    if not IN_ORDER:
        tokens = tl.load(token_ids + tokens, mask=s < length, other=0)
    tokens = tokens.to(tl.int64)
    total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    for i in range(tl.cdiv(K, BLOCK_K)):
        at = i * BLOCK_K + k
        a_at = x + tokens[:, None] * x_stride + slice * K + at[None, :]
        a = tl.load(a_at, mask=(s[:, None] < length) & (at[None, :] < K), other=0.0)
        b_at = weights + slot * slot_stride + n[None, :] * row_stride + at[:, None]
        total = tl.dot(a, tl.load(b_at, mask=(at[:, None] < K) & has[None, :], other=0.0), total)
    y = output + tokens[:, None] * output_stride + n[None, :]
    mask = (s[:, None] < length) & has[None, :]
    change = (total * tl.load(scalings + slot)).to(output.dtype.element_ty)
    tl.store(y, tl.load(y, mask=mask, other=0.0) + change, mask=mask)


def shrink(x: torch.Tensor, weights: torch.Tensor, batch: Any, num_slices: int) -> torch.Tensor:
    """x: [tokens, inputs]. weights: [slots, slices x rank, inputs]. batch: LoRABatchInfo, sorted by adapter."""
    num_tokens, (_, width, inputs) = len(x), weights.shape
    if x.device not in _arrived:
        _arrived[x.device] = torch.zeros(MAX_TILES, dtype=torch.int32, device=x.device)
    parts = min(max(1, inputs // INPUTS_PER_PART), MAX_PARTS)
    columns = triton.cdiv(width, SHRINK["BLOCK_N"])
    grid = (triton.cdiv(batch.max_len, SHRINK["BLOCK_S"]) * parts, columns, batch.bs)
    assert grid[0] * grid[1] * grid[2] <= MAX_TILES, grid
    output = torch.empty((num_tokens, width), device=x.device, dtype=x.dtype)
    partials = torch.empty(
        (parts, num_tokens, columns * SHRINK["BLOCK_N"]) if parts > 1 else 0, dtype=torch.float32, device=x.device
    )
    _shrink[grid](
        x, weights, output, partials, _arrived[x.device], width, inputs, num_slices, num_tokens, x.stride(0), *weights.stride()[:2], output.stride(0),
        batch.seg_lens, batch.seg_indptr, batch.weight_indices, batch.lora_ranks, batch.permutation, PARTS=parts, **SHRINK,
    )  # fmt: skip
    return output


def expand(x: torch.Tensor, weights: torch.Tensor, batch: Any, widths: tuple[int, ...], output: torch.Tensor) -> torch.Tensor:
    """x: [tokens, slices x rank]. weights: [slots, outputs, rank]. widths: Of the slices; all but the first are equal. output: Added to."""
    first, *others = widths
    other = others[0] if others else 0
    blocks = triton.cdiv(first, EXPAND["BLOCK_N"]) + len(others) * triton.cdiv(other, EXPAND["BLOCK_N"])
    grid = (blocks, triton.cdiv(batch.max_len, EXPAND["BLOCK_S"]), batch.bs)
    _expand[grid](
        x, weights, output, weights.shape[-1], first, other, x.stride(0), *weights.stride()[:2], output.stride(0), batch.seg_lens, batch.seg_indptr,
        batch.weight_indices, batch.lora_ranks, batch.scalings, batch.permutation, IN_ORDER=batch.permutation is None, BLOCK_K=16, **EXPAND,
    )  # fmt: skip
    return output
