"""Attention over packed sequences. megatron-core's own refuses them without Transformer Engine and stores a T x T matrix.

Sequences that begin alike share the rows of their beginning. Each sequence's own rows attend to copies of the keys and values of all its
rows, so that one call computes all sequences. The call's causal mask is aligned at the last row and the last key.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.megatron.model import kernel_packages
from infra.megatron.model.copies import gather, saved_as_rows
from infra.megatron.model.rotary import rotate

# T rows of all packed sequences, H heads, G key-value heads, D of one head


VARLEN, ONE_BY_ONE, FLASH_4 = "torch varlen_attn", "torch scaled_dot_product_attention", "flash-attn-4"
CUTE = "flash_attn.cute"
"""flash-attn-4's module."""
HEAD_DIMS, FEWEST_ROWS = (64, 128), 8192
"""Sizes of a head with which flash-attn-4 was measured, and queries of a micro-batch from which on it is used: calls cost the host more than those
of torch's kernel, which the host of a small micro-batch has no time for (docs/results/speed.md)."""


def backend(device: torch.device, dtype: torch.dtype, head_dim: int, num_rows: int = FEWEST_ROWS) -> str:
    """Return the function that computes attention. Those for packed sequences are flash kernels, which support only half precision.

    num_rows: Queries of the micro-batch; left out, enough for any function.
    """
    if device.type != "cuda" or dtype is torch.float32:
        return ONE_BY_ONE
    return FLASH_4 if head_dim in HEAD_DIMS and num_rows >= FEWEST_ROWS and _flash_4() else VARLEN


def described(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return `backend` in words, for micro-batches of any size."""
    kind = backend(device, dtype, head_dim)
    return f"{FLASH_4} from {FEWEST_ROWS} rows, {VARLEN} below" if kind == FLASH_4 else kind


def load_ahead() -> None:
    """Import flash-attn-4, if it is installed, without using a GPU: 2 s, or 12 s where its bytecode is not compiled. Of one that does not load
    nothing is said before it is needed."""
    if kernel_packages.is_installed(FLASH_4):
        with suppress(Exception):
            import_module(CUTE)


@cache
def _flash_4() -> Callable[..., Any] | None:
    """flash-attn-4's function for packed sequences, or None."""
    return kernel_packages.function_of(FLASH_4, CUTE, "flash_attn_varlen_func")


def check(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Compare output and gradients of flash-attn-4, where it is to be used, with those of torch in float32: sequences of several lengths, of some
    of which only the last rows have queries. Takes about a second, more if its kernels have to be compiled first.

    Raises infra.megatron.model.kernel_packages.UnusableKernel if they are further apart than rounding.
    """
    if backend(device, dtype, head_dim) != FLASH_4:
        return
    own, seen = torch.tensor([3, 64, 200, 300]), torch.tensor([300, 64, 457, 301])
    packed = SimpleNamespace(
        cu_seqlens_q=F.pad(own.cumsum(0), (1, 0)).to(device, torch.int32),
        cu_seqlens_kv=F.pad(seen.cumsum(0), (1, 0)).to(device, torch.int32),
        max_seqlen_q=300,
        max_seqlen_kv=457,
    )
    generator = torch.Generator(device).manual_seed(0)

    def normal(num_rows: Tensor, heads: int) -> Tensor:
        return torch.randn(int(num_rows.sum()), heads, head_dim, generator=generator, device=device).to(dtype)

    inputs, upstream = (normal(own, num_heads), normal(seen, num_kv_heads), normal(seen, num_kv_heads)), normal(own, num_heads)
    found = []
    for attend, kind in ((flash_4, dtype), (one_by_one, torch.float32)):
        query, key, value = (x.to(kind).requires_grad_() for x in inputs)
        output = attend(query, key, value, packed, head_dim**-0.5)
        gradients = torch.autograd.grad(output, (query, key, value), upstream.to(kind))
        found.append([each.detach().float() for each in (output, *gradients)])
    names = ("output", "the queries' gradient", "the keys' gradient", "the values' gradient")
    kernel_packages.compare(FLASH_4, "attention", names, *found)


class PackedAttention(nn.Module):
    """Replaces `core_attention` in megatron-core's layer spec, hence the signatures of constructor and call."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:  # Any: megatron-core has no types
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """[T, H, D], [T, G, D], [T, G, D] -> [T, H * D]; rotated to their positions, causal within each sequence."""
        packed, copies = packed_seq_params, packed_seq_params.copies
        query, key = rotate(query, packed), rotate(key, packed)
        attend = ATTEND[backend(query.device, query.dtype, query.shape[-1], len(query))]
        if copies is None:
            return attend(query, key, value, packed, self.scale).flatten(1)
        keys, values = gather(key, copies), gather(value, copies)
        with saved_as_rows(copies, (keys, key), (values, value)):
            return attend(query, keys, values, packed, self.scale).flatten(1)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    """Attention of each sequence by torch's own function. query: [T, H, D]; key, value: [N, G, D], of N copies; packed: where sequences begin in
    both; scale: of the logits. Returns [T, H, D]."""
    own, lengths = packed.cu_seqlens_q.diff().tolist(), packed.cu_seqlens_kv.diff().tolist()
    outputs = []
    for parts in zip(torch.split(query, own), torch.split(key, lengths), torch.split(value, lengths), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        # torch's own causal mask is aligned at the first row and the first key.
        num_own, num_keys = q.shape[2], k.shape[2]
        mask = None
        if num_own < num_keys:
            mask = torch.ones(num_own, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_own)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": True}
        outputs.append(F.scaled_dot_product_attention(q, k, v, **options)[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    """The same as `one_by_one`, by one call of torch's kernel for packed sequences. On a GPU, in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters(varlen_attn)
    # torch 2.13 asks whether heads are grouped, torch 2.11 does not.
    options: dict[str, Any] = {name: value for name, value in (("enable_gqa", True), ("scale", scale)) if name in known}
    options["window_size"] = (-1, 0)  # causal
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    output = varlen_attn(q, k, v, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv, **options)
    assert isinstance(output, Tensor)
    return output


# Perf: the trainer's step 1.89 -> 1.80 s at 0.5B, 16.5 -> 15.9 s at 7B (H200, docs/results/speed.md).
def flash_4(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    """The same by flash-attn-4."""
    function = _flash_4()
    assert function is not None
    options = {"softmax_scale": scale, "causal": True, "max_seqlen_q": packed.max_seqlen_q, "max_seqlen_k": packed.max_seqlen_kv}
    made = function(query, key, value, cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_kv, **options)
    output: Tensor = made[0] if isinstance(made, tuple) else made  # with it the log of the softmax's sum
    return output


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


ATTEND = {ONE_BY_ONE: one_by_one, VARLEN: varlen, FLASH_4: flash_4}
