"""What NVIDIA's driver says about memory: of each GPU, and of each process on it. The only place that asks it.

A GPU is named by the driver's number, whatever CUDA_VISIBLE_DEVICES says. In a container the driver may name no processes, or those
of another process namespace; who reads it must be able to do without them.
"""

import subprocess
from typing import NamedTuple

from infra import devices

TIMEOUT_S = 60
MIB = 2**20
GIB = 2**30


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


def read() -> Reading:
    """Empty where there is no GPU."""
    if devices.device() == "cpu":
        return Reading()
    gpus = parse_gpus(_ask("--query-gpu=index,uuid,memory.used,memory.total"))
    return Reading(gpus, parse_holdings(_ask("--query-compute-apps=gpu_uuid,pid,used_memory"), gpus))


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """From `0, GPU-1b2..., 512, 143771` a line, in MiB."""
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines() if line.strip()]
    return tuple(Gpu(int(number), uuid, int(used) * MIB, int(total) * MIB) for number, uuid, used, total in rows)


def parse_holdings(listing: str, gpus: tuple[Gpu, ...]) -> tuple[Holding, ...]:
    """From `GPU-1b2..., 4711, 99814` a line, in MiB; lines without a figure (`[N/A]`) say nothing."""
    number_of = {gpu.uuid: gpu.number for gpu in gpus}
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines() if line.strip()]
    return tuple(
        Holding(number_of[uuid], int(pid), int(used) * MIB) for uuid, pid, used in rows if uuid in number_of and used.isdigit()
    )


def _ask(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
