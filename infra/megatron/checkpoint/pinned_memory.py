"""Memory of the host that a program keeps, page-locked, and the copy of the frozen weights in it: made once, and read back at every wake.

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
"""What the copy must leave free on the host: so much, and so much of its own size. The export holds adapter and optimizer state there,
and weights in a memory file system are not to be pushed out by their own copy."""


class Kind(NamedTuple):
    """Of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def num_page_bytes(kinds: Sequence[Kind]) -> int:
    return -(-sum(kind.num_bytes for kind in kinds) // PAGE) * PAGE


class HostMemory:
    """Tensors, not filled yet: in each block one right after the other, each block on pages of its own."""

    def __init__(self, blocks: Sequence[Sequence[Kind]], *, locks: bool) -> None:
        """locks: where there is a GPU; by a thread, block by block."""
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
        """Copies to and from a page that is being locked would wait for it one by one."""
        if self.thread:
            self.thread.join()
        return self.tensors

    def free(self) -> None:
        """Before it is left: what is locked must not go back to the allocator."""
        self.ready()
        for address in self.locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch
        self.locked = []

    def _lock(self, device: int) -> None:
        """Without it the copies work too, at a fraction of the speed."""
        torch.cuda.set_device(device)  # a thread begins on the first
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
        """Unless wanted it only drops the weights and makes room for them again: they are read from disk."""
        self.sources = list(net.parameters())
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
        """Copy the weights, if that is still to be done: they never change."""
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
        """Fill the parameters again; False where there is no copy and they hold nothing yet."""
        for parameter, shape in zip(self.sources, self.shapes, strict=True):
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        if self.memory is None:
            return False
        for copy, parameter in zip(self.memory.ready(), self.sources, strict=True):
            parameter.detach().copy_(copy, non_blocking=True)
        torch.cuda.synchronize()
        return True
