"""GPUs as reported by NVML: their number, load, and memory by process. No other module calls NVML.

GPUs hidden by CUDA_VISIBLE_DEVICES are left out. The others keep NVML's numbers. In a container NVML may list no processes, or those of
another process namespace, so callers must work without them.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pynvml

GIB = 2**30
DriverError = pynvml.NVMLError
"""The error that the functions here may raise if there is a driver."""
NO_DRIVER = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)


class Gpu(NamedTuple):
    number: int
    uuid: str
    used_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


class Holding(NamedTuple):
    """What one process has on one GPU."""

    gpu: int
    pid: int
    num_bytes: int


class Reading(NamedTuple):
    gpus: tuple[Gpu, ...] = ()
    holdings: tuple[Holding, ...] = ()

    @property
    def pids(self) -> set[int]:
        """Memory of all processes that NVML lists."""
        return {holding.pid for holding in self.holdings}

    def of(self, pids: set[int]) -> dict[int, int]:
        """Bytes that these processes have, by GPU; GPUs on which they have none are left out."""
        sums: dict[int, int] = {}
        for holding in self.holdings:
            if holding.pid in pids:
                sums[holding.gpu] = sums.get(holding.gpu, 0) + holding.num_bytes
        return sums

    def holders(self, gpu: int) -> str:
        """Who has how much of a GPU, for people."""
        found = [f"pid {h.pid}: {h.num_bytes / GIB:.1f} GiB" for h in self.holdings if h.gpu == gpu]
        return ", ".join(found) or "no process that the driver names"


def numbers() -> tuple[int, ...]:
    """Read the GPUs that this process may use, in CUDA's order; none without a driver."""
    return tuple(_handles(os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def name(number: int) -> str:
    """Return the name of a GPU, such as `NVIDIA H200`."""
    return str(pynvml.nvmlDeviceGetName(_handle(number)))


def compute_capability(number: int) -> tuple[int, int]:
    """Return a GPU's compute capability, such as (9, 0)."""
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(_handle(number))
    return int(major), int(minor)


def version() -> str:
    """Return the driver's version, such as `550.54.15`; needs a GPU."""
    return str(pynvml.nvmlSystemGetDriverVersion())


def busy_percent(number: int) -> int:
    """Share of the last moment in which a kernel ran."""
    return int(pynvml.nvmlDeviceGetUtilizationRates(_handle(number)).gpu)


def read() -> Reading:
    """Read all GPUs; empty without a GPU."""
    gpus, holdings = [], []
    for number in numbers():
        handle = _handle(number)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)  # without what the driver keeps for itself
        gpus.append(Gpu(number, pynvml.nvmlDeviceGetUUID(handle), int(memory.used), int(memory.total)))
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.usedGpuMemory is not None:
                holdings.append(Holding(number, process.pid, int(process.usedGpuMemory)))
    return Reading(tuple(gpus), tuple(holdings))


# Perf: a release with its looks 0.36 -> 0.16 s, by NVML instead of nvidia-smi (H200, docs/history/decisions.md).
def _handle(number: int) -> Any:
    return _handles(os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"))[number]


@cache
def _handles(pid: int, visible: str | None) -> dict[int, Any]:
    """Return the handles by number. A forked process queries them again."""
    if visible is not None and not visible.strip():
        return {}
    try:
        pynvml.nvmlInit()
    except NO_DRIVER:
        return {}
    except pynvml.NVMLError as error:  # else it would be taken for a machine without GPUs
        raise RuntimeError(
            f"NVIDIA's driver is there and does not answer: {str(error).rstrip('.')}. Mend it (nvidia-smi shows the same), or set "
            "CUDA_VISIBLE_DEVICES to nothing to go on without GPUs"
        ) from error
    handles = {number: pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())}
    uuids = {number: str(pynvml.nvmlDeviceGetUUID(handle)) for number, handle in handles.items()}
    return {number: handles[number] for number in visible_of(uuids, visible)}


def visible_of(uuids: Mapping[int, str], visible: str | None) -> list[int]:
    """Return the numbers of the GPUs that a process may use, in its order. uuids: by number.

    visible: CUDA_VISIBLE_DEVICES: numbers, or UUIDs or their prefixes, whose order counts; None where it is not set.

    Raises:
        ValueError: for a part of a GPU (MIG).
    """
    if visible is None:
        return list(uuids)
    words = [word.strip() for word in visible.split(",")]
    if parts := [word for word in words if word.startswith("MIG-")]:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES names {parts[0]}, a part of a GPU (MIG): whole GPUs only, such as 0 or GPU-<uuid>"
        )
    return [
        number
        for word in words
        for number, uuid in uuids.items()
        if word == str(number) or (word.startswith("GPU-") and uuid.startswith(word))
    ]
