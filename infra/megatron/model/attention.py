"""Attention over packed sequences. megatron-core's own refuses them without Transformer Engine and stores a T x T matrix."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.megatron.model.rotary import rotate

# T tokens of all packed sequences, H heads, G key-value heads, D of one head


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
        query, key = rotate(query, packed_seq_params), rotate(key, packed_seq_params)
        attend = _varlen if backend(query.device, query.dtype) == VARLEN else _one_by_one
        return attend(query, key, value, packed_seq_params, self.scale).flatten(1)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    lengths = packed.cu_seqlens_q.diff().tolist()
    outputs = []
    for parts in zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: Any, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters(varlen_attn)
    # torch 2.10 and earlier take is_causal; later versions take a window, and the newest also whether heads are grouped.
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    options |= {name: value for name, value in (("enable_gqa", True), ("scale", scale)) if name in known}
    starts, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    output = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
