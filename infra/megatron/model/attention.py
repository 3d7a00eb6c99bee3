"""Attention over packed sequences. megatron-core's own refuses them without Transformer Engine and stores a T x T matrix.

Sequences that begin alike share the rows of their beginning. Each sequence's own rows attend to copies of the keys and values of all its
rows, so that one call computes all sequences. The call's causal mask is aligned at the last row and the last key.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.megatron.model.copies import gather, saved_as_rows
from infra.megatron.model.rotary import rotate

# T rows of all packed sequences, H heads, G key-value heads, D of one head


VARLEN, ONE_BY_ONE = "torch varlen_attn", "torch scaled_dot_product_attention"


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return the function that computes attention. The one for packed sequences is a flash kernel, which supports only half precision."""
    return VARLEN if device.type == "cuda" and dtype is not torch.float32 else ONE_BY_ONE


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
        attend = varlen if backend(query.device, query.dtype) == VARLEN else one_by_one
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


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
