"""System metrics of a step: CPU, memory and GPUs of this machine, sampled by a thread and written to a file in the step's folder.

At most MAX_ROWS rows are kept, however long a step is. When there are too many, every second row is dropped and the interval doubles. Rows
use MLflow's names, so that its page shows them as system metrics. They are uploaded with the step's other files (infra/tracking/upload.py).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import psutil

from infra.machine import nvml
from infra.processes import gpu_programs
from infra.progress.work import looked_at

log = logging.getLogger(__name__)

AT = "at"
"""Column of each row with the seconds since the epoch."""
MAX_ROWS = 60
EVERY_S = 1.0
"""Seconds between two samples at the start."""
MIB = 2**20
FAILURES = (OSError, ValueError, psutil.Error, nvml.DriverError)

Row = dict[str, float]


class Sampler:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.every_s = EVERY_S
        psutil.cpu_percent()  # it measures since its last call
        self.next_at = time.monotonic() + EVERY_S

    def look(self) -> None:
        if time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + self.every_s
        try:
            self.add(now())
        except FAILURES as error:
            log.debug("the machine's load is not known just now: %s", error)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self.rows = self.rows[::2]
            self.every_s *= 2


_sampler: ContextVar[Sampler | None] = ContextVar("sampler", default=None)


@contextmanager
def record_system_metrics() -> Iterator[None]:
    """Sample while the block runs. A nested block has its own rows."""
    sampler = Sampler()
    token = _sampler.set(sampler)
    try:
        with looked_at(sampler.look, EVERY_S):
            yield
    finally:
        _sampler.reset(token)


def rows() -> list[Row]:
    """Return the rows of the running block; none outside of a block."""
    sampler = _sampler.get()
    return list(sampler.rows) if sampler else []


def now() -> Row:
    """Return the time, in seconds since 1970, and the metrics, by the names that MLflow gives them."""
    memory = psutil.virtual_memory()
    row = {
        AT: time.time(),
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": (memory.total - memory.available) / MIB,
        "system/system_memory_usage_percentage": memory.percent,
    }
    row |= {f"system/{kind}_memory_megabytes": held / MIB for kind, held in gpu_programs.resident_bytes().items()}
    return row | _gpus()


def _gpus() -> Row:
    """Return the GPU metrics as reported by NVML."""
    found: Row = {}
    for gpu in nvml.read().gpus:
        found |= {
            f"system/gpu_{gpu.number}_utilization_percentage": float(nvml.busy_percent(gpu.number)),
            f"system/gpu_{gpu.number}_memory_usage_megabytes": gpu.used_bytes / MIB,
        }
    return found
