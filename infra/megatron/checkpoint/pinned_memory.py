"""Pinned host memory that a program keeps, and the copy of the frozen weights in it: made once, and read back at every wake.

Page-locking takes most of the time (10 s for 15 GB), so a background thread does it during the first step.
"""

import itertools
import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

PAGE = 4096
SPARE_BYTES = 8 * 2**30
SPARE_SHARE = 0.5
"""The copy must leave SPARE_BYTES and this share of its own size free on the host. The export holds adapter and optimizer state there,
and weights in a memory file system must not be evicted by their own copy."""


class Kind(NamedTuple):
    """Shape and type of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def num_page_bytes(kinds: Sequence[Kind]) -> int:
    """Bytes of whole pages that hold these tensors one after another."""
    return -(-sum(kind.num_bytes for kind in kinds) // PAGE) * PAGE


class HostMemory:
    """Uninitialized tensors: adjacent within a block, with each block on its own pages."""

    def __init__(self, blocks: Sequence[Sequence[Kind]], *, locks: bool) -> None:
        """locks: Pin the memory, if there is a GPU. A thread does it, block by block."""
        sizes = [num_page_bytes(kinds) for kinds in blocks]
        buffer = torch.empty(sum(sizes) + PAGE, dtype=torch.uint8)
        buffer = buffer[-buffer.data_ptr() % PAGE :]
        self.parts = torch.split(buffer[: sum(sizes)], sizes)
        self.tensors: list[Tensor] = []
        for part, kinds in zip(self.parts, blocks, strict=True):
            begins = itertools.accumulate((kind.num_bytes for kind in kinds), initial=0)
            self.tensors += [
                part[at : at + k.num_bytes].view(k.dtype).view(k.shape) for at, k in zip(begins, kinds, strict=False)
            ]
        self.locked: list[int] = []
        self.thread: threading.Thread | None = None
        if locks:
            self.thread = threading.Thread(target=self._lock, args=(torch.cuda.current_device(),), daemon=True)
            self.thread.start()

    def ready(self) -> list[Tensor]:
        """Wait until the memory is pinned: each copy to or from a page that is being locked would wait for it."""
        if self.thread:
            self.thread.join()
        return self.tensors

    def free(self) -> None:
        """Unpin the memory before it is released: pinned memory must not go back to the allocator."""
        self.ready()
        for address in self.locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch
        self.locked = []

    def _lock(self, device: int) -> None:
        """Pin the memory. Copies also work without it, at a fraction of the speed."""
        torch.cuda.set_device(device)  # a thread starts on the first device
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch
        for part in self.parts:
            if not part.numel():
                continue
            if int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), 0)) != 0:
                log.warning("the host's memory could not be page-locked: copies to and from the GPU will be slower")
                return
            self.locked.append(part.data_ptr())


# Perf: 7B weights return in 0.30 s; a fresh program reads them in 2.6 s (H200, docs/results/h200-trainer.md).
class HostCopy:
    def __init__(self, net: nn.Module, *, is_wanted: bool = True) -> None:
        """is_wanted: False: only drop the weights and allocate memory for them again; they are read from disk."""
        self.sources = [parameter for parameter in net.parameters() if parameter.numel()]  # shared experts have their own keeper
        self.shapes = [parameter.shape for parameter in self.sources]
        self.memory: HostMemory | None = None
        self.is_taken = False
        kinds = [Kind(parameter.shape, parameter.dtype) for parameter in self.sources]
        num_bytes = sum(num_page_bytes([kind]) for kind in kinds)
        if not is_wanted:
            return
        available = psutil.virtual_memory().available
        if num_bytes * (1 + SPARE_SHARE) + SPARE_BYTES > available:
            log.info(
                "no room for %.0f GiB of weights on the host, of which %.0f GiB are free: they will be read from disk",
                num_bytes / 2**30,
                available / 2**30,
            )
            return
        self.memory = HostMemory([[kind] for kind in kinds], locks=True)

    def take(self) -> None:
        """Copy the weights, unless that was done before: they never change."""
        if self.memory is None or self.is_taken:
            return
        for copy, parameter in zip(self.memory.ready(), self.sources, strict=True):
            copy.copy_(parameter.detach(), non_blocking=True)
        torch.cuda.synchronize()
        self.is_taken = True

    def drop(self) -> None:
        """Free the device's memory of all parameters."""
        for parameter in self.sources:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def give_back(self) -> bool:
        """Fill the parameters again. Returns False if there is no copy; then they are uninitialized."""
        for parameter, shape in zip(self.sources, self.shapes, strict=True):
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        if self.memory is None:
            return False
        for copy, parameter in zip(self.memory.ready(), self.sources, strict=True):
            parameter.detach().copy_(copy, non_blocking=True)
        torch.cuda.synchronize()
        return True
