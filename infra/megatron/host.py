"""A copy of the frozen weights in the host's memory: made once, page-locked, and read back at every wake.

Page-locking takes most of the time (10 s for 15 GB), so a thread does it beside the first step.
"""

import logging
import threading

import psutil
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

PAGE = 4096
SPARE_BYTES = 8 * 2**30
SPARE_SHARE = 0.5
"""What the copy must leave free on the host: so much, and so much of its own size. The export holds adapter and optimizer state there,
and weights in a memory file system are not to be pushed out by their own copy."""


class HostCopy:
    def __init__(self, net: nn.Module, *, is_wanted: bool = True) -> None:
        """Unless wanted it only drops the weights and makes room for them again: they are read from disk."""
        self.sources = list(net.parameters())
        self.shapes = [parameter.shape for parameter in self.sources]
        self.copies: list[Tensor] | None = None
        self.is_taken = False
        sizes = [-(-p.numel() * p.element_size() // PAGE) * PAGE for p in self.sources]
        self.thread: threading.Thread | None = None
        if not is_wanted:
            return
        available = psutil.virtual_memory().available
        if sum(sizes) * (1 + SPARE_SHARE) + SPARE_BYTES > available:
            log.info(
                "no room for %.0f GiB of weights on the host, of which %.0f GiB are free: they will be read from disk",
                sum(sizes) / 2**30,
                available / 2**30,
            )
            return
        buffer = torch.empty(sum(sizes) + PAGE, dtype=torch.uint8)
        buffer = buffer[-buffer.data_ptr() % PAGE :]
        parts = torch.split(buffer[: sum(sizes)], sizes)
        self.copies = [
            part[: p.numel() * p.element_size()].view(p.dtype).view(p.shape) for part, p in zip(parts, self.sources, strict=True)
        ]
        self.thread = threading.Thread(target=_lock_pages, args=(parts, torch.cuda.current_device()), daemon=True)
        self.thread.start()

    def take(self) -> None:
        """Copy the weights, if that is still to be done: they never change."""
        if self.copies is None or self.is_taken:
            return
        assert self.thread is not None
        self.thread.join()
        for copy, parameter in zip(self.copies, self.sources, strict=True):
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
        if self.copies is None:
            return False
        for copy, parameter in zip(self.copies, self.sources, strict=True):
            parameter.detach().copy_(copy, non_blocking=True)
        torch.cuda.synchronize()
        return True


def _lock_pages(parts: tuple[Tensor, ...], device: int) -> None:
    """Without it the copies work too, at a fraction of the speed."""
    torch.cuda.set_device(device)  # a thread begins on the first
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch
    for part in parts:
        if part.numel() and int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), 0)) != 0:
            log.warning("the host's memory could not be page-locked: waking will be slower")
            return
