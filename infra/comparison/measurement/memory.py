"""Memory over time, by phase: on GPUs as reported by NVML, on a CPU the resident memory of engine and trainer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from types import TracebackType
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from infra.engines.server import server_process
from infra.machine import devices
from infra.processes import children
from infra.processes.children import ProcessRef

GIB = 2**30
EVERY_S = 0.2
FIRST_READING_S = 30.0


class MemoryPoint(NamedTuple):
    at_s: float
    """Seconds since the trace started."""
    gib: float
    phase: str


class PhaseMemory(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mean_gib: float
    peak_gib: float


class MemoryTrace:
    """A context manager that samples memory in a thread. Use `phase` within it."""

    def __init__(self, also: Callable[[], ProcessRef | None] = lambda: None) -> None:
        self.readings: list[MemoryPoint] = []
        self._also, self._phase, self._begin = also, "", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(timeout=10)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign readings to this phase. The phase does not end before it has a reading."""
        self._phase = name
        yield
        deadline = time.monotonic() + FIRST_READING_S
        while not any(reading.phase == name for reading in self.readings) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._phase = ""

    def of(self, phase: str) -> PhaseMemory | None:
        found = [reading.gib for reading in self.readings if reading.phase == phase]
        return PhaseMemory(mean_gib=fmean(found), peak_gib=max(found)) if found else None

    def _add(self, gib: float) -> None:
        self.readings.append(MemoryPoint(round(time.monotonic() - self._begin, 3), gib, self._phase))

    def _follow(self) -> None:
        while not self._done.is_set():
            self._add((devices.gpu_memory_used_bytes() if devices.num_gpus() else self._resident_bytes()) / GIB)
            self._done.wait(EVERY_S)

    def _resident_bytes(self) -> int:
        refs = [state.process for state in [server_process.recorded()] if state]
        refs += [ref for ref in [self._also()] if ref]
        return sum(children.resident_bytes(ref) for ref in refs)
