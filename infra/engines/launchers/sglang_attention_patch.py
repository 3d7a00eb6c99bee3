"""A patch of SGLang 0.5.18's attention on a CPU, loaded by `sglang_cpu.py`: one call for all sequences of a batch that are of equal length.

SGLang calls torch's attention once for each sequence and layer. Samples of one prompt grow together, so most sequences of a batch are as long as
others. A result does not depend on what is in the same call, to the last bit: torch's CPU kernel works on one sequence and head at a time.

Runs in SGLang's own environment and imports nothing of ours.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[..., torch.Tensor]
KNOWN = ("query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens")
"""The first arguments of SGLang's functions, by name; another version may have others."""


def equal_rows(*columns: torch.Tensor) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """The numbers of sequences whose lengths are equal, with these lengths."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, lengths in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        groups.setdefault(lengths, []).append(number)
    yield from groups.items()


def attend(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    scaling: float | None,
    enable_gqa: bool,
    causal: bool,
) -> torch.Tensor:
    """[sequences, tokens, heads, size] -> the same, by the keys and values in the slots [sequences, length]."""
    keys, values = (cache[slots].movedim(1, 2).to(query.dtype) for cache in caches)
    found = scaled_dot_product_attention(
        query.movedim(1, 2), keys, values, enable_gqa=enable_gqa, scale=scaling, is_causal=causal
    )
    return found.movedim(2, 1)


def is_plain(encoder_lens: torch.Tensor | None, is_cross_attn: bool, sliding_window_size: int | None) -> bool:
    """Whether each sequence attends to all that is before it."""
    return encoder_lens is None and not is_cross_attn and (sliding_window_size is None or sliding_window_size < 0)


def grouped_decode(single: Attention) -> Attention:
    """Wrap `_run_sdpa_forward_decode`, where each sequence has one new token."""

    def decode(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if not is_plain(encoder_lens, is_cross_attn, sliding_window_size):
            return single(
                *(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, scaling),
                *(enable_gqa, causal, is_cross_attn, sliding_window_size),
            )
        for (length,), numbers in equal_rows(seq_lens):
            slots = req_to_token[req_pool_indices[numbers], :length]
            found = attend(query[numbers].unsqueeze(1), (k_cache, v_cache), slots, scaling, enable_gqa, causal)
            output[numbers] = found.squeeze(1)
        return output

    return decode


def mend() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    single = TorchNativeAttnBackend._run_sdpa_forward_decode
    if tuple(inspect.signature(single).parameters)[1 : 1 + len(KNOWN)] == KNOWN:
        TorchNativeAttnBackend._run_sdpa_forward_decode = grouped_decode(single)
