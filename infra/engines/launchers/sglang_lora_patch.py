"""A patch of SGLang 0.5.17 (GPU) and 0.5.18 (CPU), loaded by `sglang_server.py`: stacked adapters of experts reach the GPU in one copy per tensor.

SGLang copies the adapter of each expert by itself into the memory that its kernels read: 30,720 copies, each through page-locked memory of its
own, for rank 8 on all experts of 30B-A3B. The values and their places are the same here.

Runs in SGLang's own environment and imports nothing of ours.
"""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

KNOWN = ("self", "weights", "cache_keys", "localize")
"""The arguments of SGLang's function; another version may have others."""
Weights = torch.Tensor | dict[int, torch.Tensor]


class StackedExperts(torch.Tensor):
    """[experts, rows, columns], indexed by rows and columns, as the weights of one expert are."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[(slice(None), *index)]


# Perf: adapters of all experts of 30B-A3B on the GPU 1.25 -> 0.20 s (rank 8, H200, docs/results/speed.md).
def all_at_once(one_by_one: Callable[..., Iterator[tuple[Any, torch.Tensor, Any]]]) -> Callable[..., Iterator[Any]]:
    """Wrap `LoRAMemoryPool._iter_local_expert_weights`: a stacked tensor comes once, with all of this rank's experts as its number."""

    def iterated(
        self: Any, weights: Weights, cache_keys: Any, *, localize: bool = True
    ) -> Iterator[tuple[Any, torch.Tensor, Any]]:
        if isinstance(weights, dict) or weights.dim() != 3:
            yield from one_by_one(self, weights, cache_keys, localize=localize)
            return
        begin, end = 0, len(weights)
        if self.moe_use_local_expert_ids and localize:
            begin = min(self.moe_ep_rank * self._num_experts_local, end)
            end = min(begin + self._num_experts_local, end)
        device = next(iter(self.A_buffer.values()))[0].device
        on_device = weights[begin:end].to(device)  # SGLang moves only what is still on the host through page-locked memory
        yield slice(0, end - begin), on_device.as_subclass(StackedExperts), cache_keys

    return iterated


def mend(module: ModuleType) -> None:
    """module: sglang.srt.lora.mem_pool."""
    one_by_one = module.LoRAMemoryPool._iter_local_expert_weights
    if tuple(inspect.signature(one_by_one).parameters) == KNOWN:
        module.LoRAMemoryPool._iter_local_expert_weights = all_at_once(one_by_one)
