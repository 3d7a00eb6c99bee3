"""A patch of SGLang 0.5.17 (GPU) and 0.5.18 (CPU), loaded by `sglang_server.py`: stacked adapters of experts reach the GPU in one copy per tensor.

SGLang copies the adapter of each expert by itself into the memory that its kernels read: 30,720 copies, each through page-locked memory of its
own, for rank 8 on all experts of 30B-A3B. Before that it copies the adapters of gate and up, which its kernels read as one matrix, into new
memory of the host; here they are joined on the GPU. The values and their places are the same.

Runs in SGLang's own environment and imports nothing of ours.
"""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

KNOWN = {
    "_iter_local_expert_weights": ("self", "weights", "cache_keys", "localize"),
    "normalize_gate_up_proj": ("self", "weight_names", "weights"),
}
"""The arguments of SGLang's functions; another version may have others."""
Weights = torch.Tensor | dict[int, torch.Tensor]


class StackedExperts(torch.Tensor):
    """[experts, rows, columns], indexed by rows and columns, as the weights of one expert are."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[(slice(None), *index)]


class Joined(torch.Tensor):
    """Two tensors [experts, rows, columns] as one, rows after rows. What computes with it, as SGLang does with several GPUs, has them copied
    together, once."""

    first: torch.Tensor
    second: torch.Tensor
    whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> "Joined":
        shape = (len(first), first.shape[1] + second.shape[1], first.shape[2])
        joined: Joined = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        joined.first, joined.second, joined.whole = first, second, None
        return joined

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's is a stub
        args, kwargs = tree_map(lambda each: each._joined() if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _joined(self) -> torch.Tensor:
        if self.whole is None:
            self.whole = self.part(0, len(self), self.device)
        return self.whole

    def part(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Return some of the experts, joined on a device."""
        return torch.cat([each[begin:end].to(device) for each in (self.first, self.second)], 1)


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
        # SGLang moves only what is still on the host through page-locked memory.
        on_device = weights.part(begin, end, device) if isinstance(weights, Joined) else weights[begin:end].to(device)
        yield slice(0, end - begin), on_device.as_subclass(StackedExperts), cache_keys

    return iterated


# Perf: load of an adapter 0.34 to 0.54 -> 0.03 to 0.18 s in a run of 30B-A3B (rank 8, H200, docs/results/speed.md).
def joined_later(join: Callable[..., None]) -> Callable[..., None]:
    """Wrap `LoRAAdapter.normalize_gate_up_proj`: stacked tensors of gate and up are joined where they are needed."""

    def normalized(self: Any, weight_names: list[str], weights: dict[str, torch.Tensor]) -> None:
        for gate in weight_names:
            up, both = (gate.replace("gate_proj", name) for name in ("up_proj", "gate_up_proj"))
            if up != gate and _are_stacked_alike(weights.get(gate), weights.get(up)):
                weights[both] = Joined(weights.pop(gate), weights.pop(up))
        join(self, [name for name in weight_names if name in weights], weights)

    return normalized


def _are_stacked_alike(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return (
        first is not None
        and second is not None
        and first.dim() == 3
        and (first.shape, first.dtype) == (second.shape, second.dtype)
    )


def mend_pool(module: ModuleType) -> None:
    """module: sglang.srt.lora.mem_pool."""
    _wrap(module.LoRAMemoryPool, "_iter_local_expert_weights", all_at_once)


def mend_adapter(module: ModuleType) -> None:
    """module: sglang.srt.lora.lora."""
    _wrap(module.LoRAAdapter, "normalize_gate_up_proj", joined_later)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    if tuple(inspect.signature(getattr(owner, name)).parameters) == KNOWN[name]:
        setattr(owner, name, wrapper(getattr(owner, name)))
