"""A patch of SGLang 0.5.17 (GPU) and 0.5.18 (CPU), loaded by `sglang_server.py`: LoRA's share of a decoding step.

    prepare_lora_batch     where the batch has the same adapters as in the step before, the memory that CUDA graphs read is left as it is
    products with A and B  kernels of ours (`sglang_lora_kernels.py`), in bfloat16 and float16. Not in deterministic mode: there SGLang's own
                           sum a token's products in the same order in prefill and in decoding.

Runs in SGLang's own environment and imports nothing of ours.
"""

import inspect
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

KNOWN = {
    "prepare_lora_batch": ("self", "forward_batch", "weight_indices", "lora_ranks", "scalings", "use_cuda_graph", "use_prefill_cuda_graph"),
    "sgemm_lora_a_fwd": ("x", "weights", "batch_info", "stack_num"),
    "sgemm_lora_b_fwd": ("x", "weights", "batch_info", "base_output"),
    "gate_up_lora_b_fwd": ("x", "gate_up_lora_b", "batch_info", "output_dim", "base_output"),
    "qkv_lora_b_fwd": ("x", "qkv_lora_b", "batch_info", "output_offset", "max_qkv_out_dim", "base_output", "n_slices"),
}  # fmt: skip
"""The arguments of SGLang's functions; another version may have others."""
HALF = (torch.bfloat16, torch.float16)
Forward = Callable[..., torch.Tensor]


# Perf: a decoding step 24.7 -> 24.0 ms (7B, 512 requests, H200, docs/results/speed.md).
def once(prepare: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TritonLoRABackend.prepare_lora_batch`, which launches some 25 small kernels and copies while the GPU waits."""

    def prepared(
        self: Any,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        is_decoding = use_cuda_graph and not forward_batch.forward_mode.is_extend()
        memory = getattr(self, "cuda_graph_batch_info", None)
        asked = (id(memory), forward_batch.batch_size, tuple(weight_indices), tuple(lora_ranks), tuple(scalings))
        before = getattr(self, "_prepared", None)
        if is_decoding and before is not None and before[0] == asked:
            self.batch_info, self.sgemm_batch_info = before[1:]
            self.lm_head_batch_info = self.lm_head_pass_batch_infos = None  # as for each decoding step
            return
        prepare(self, forward_batch, weight_indices, lora_ranks, scalings, use_cuda_graph, use_prefill_cuda_graph)
        # Not beyond the next prompts: what a wake of the engine did to the memory does not matter then.
        self._prepared = (asked, self.batch_info, self.sgemm_batch_info) if is_decoding else None

    return prepared


def shrinking(theirs: Forward, shrink: Forward) -> Forward:
    """Wrap `sgemm_lora_a_fwd`. Only where tokens are sorted by adapter, as in decoding steps."""

    def a(x: torch.Tensor, weights: torch.Tensor, batch_info: Any, stack_num: int = 1) -> torch.Tensor:
        if batch_info.permutation is None or x.dtype not in HALF:
            return theirs(x, weights, batch_info, stack_num)
        return shrink(x, weights, batch_info, stack_num)

    return a


def expanding(theirs: Forward, expand: Forward) -> Forward:
    """Wrap `sgemm_lora_b_fwd`."""

    def b(x: torch.Tensor, weights: torch.Tensor, batch_info: Any, base_output: torch.Tensor | None = None) -> torch.Tensor:
        if base_output is None or x.dtype not in HALF:
            return theirs(x, weights, batch_info, base_output)
        return expand(x, weights, batch_info, (weights.shape[-2],), base_output)

    return b


def expanding_gate_up(theirs: Forward, expand: Forward) -> Forward:
    """Wrap `gate_up_lora_b_fwd`."""

    def b(
        x: torch.Tensor, gate_up_lora_b: torch.Tensor, batch_info: Any, output_dim: int, base_output: torch.Tensor | None = None
    ) -> torch.Tensor:
        if base_output is None or x.dtype not in HALF:
            return theirs(x, gate_up_lora_b, batch_info, output_dim, base_output)
        return expand(x, gate_up_lora_b, batch_info, (output_dim, output_dim), base_output)

    return b


def expanding_qkv(theirs: Forward, expand: Forward) -> Forward:
    """Wrap `qkv_lora_b_fwd`. The widths of queries, keys and values are read from the GPU, once for each layer, before a CUDA graph has them."""
    known: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}

    def widths_of(offsets: torch.Tensor) -> tuple[int, ...] | None:
        if id(offsets) not in known:
            if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            ends = offsets.tolist()
            known[id(offsets)] = offsets, tuple(end - begin for begin, end in pairwise(ends))
        return known[id(offsets)][1]

    def b(
        x: torch.Tensor,
        qkv_lora_b: torch.Tensor,
        batch_info: Any,
        output_offset: torch.Tensor,
        max_qkv_out_dim: int,
        base_output: torch.Tensor | None = None,
        n_slices: int = 3,
    ) -> torch.Tensor:
        widths = widths_of(output_offset) if base_output is not None and x.dtype in HALF else None
        if widths is None or len(set(widths[1:])) > 1:
            return theirs(x, qkv_lora_b, batch_info, output_offset, max_qkv_out_dim, base_output, n_slices)
        return expand(x, qkv_lora_b, batch_info, widths, base_output)

    return b


def mend(module: ModuleType, kernels: Callable[[], ModuleType] | None) -> None:
    """module: sglang.srt.lora.backend.triton_backend. kernels: Loads those of ours; None: SGLang's own compute."""
    backend = module.TritonLoRABackend
    if _is_known("prepare_lora_batch", backend.prepare_lora_batch):
        backend.prepare_lora_batch = once(backend.prepare_lora_batch)
    ways = {
        "sgemm_lora_a_fwd": shrinking,
        "sgemm_lora_b_fwd": expanding,
        "gate_up_lora_b_fwd": expanding_gate_up,
        "qkv_lora_b_fwd": expanding_qkv,
    }
    theirs: dict[str, Any] = {name: getattr(module, name, None) for name in ways}
    if kernels is None or not all(_is_known(*each) for each in theirs.items()):
        return
    ours = kernels()
    for name, way in ways.items():
        setattr(module, name, way(theirs[name], ours.shrink if way is shrinking else ours.expand))


def _is_known(name: str, function: Any) -> bool:
    return callable(function) and tuple(inspect.signature(function).parameters) == KNOWN[name]
