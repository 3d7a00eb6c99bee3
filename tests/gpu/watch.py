"""An independent witness: the driver's counters of one GPU and the machine's memory every 20 ms, as a CSV file.

    python tests/gpu/watch.py FILE.csv [--gpu NUMBER]        until it is ended

A row is: Unix seconds, GPU utilisation in % (of the driver's last window), GPU memory in use in GiB, power in W, memory of the
machine that is not available in GiB.
It shares nothing with what it watches.
"""

import argparse
import csv
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

EVERY_S = 0.02


class Row(NamedTuple):
    at: float
    utilisation: int
    gpu_gib: float
    watt: float
    host_gib: float


@contextmanager
def watching(file: Path | None, gpu: int = 0) -> Iterator[None]:
    """Watch a GPU until the block ends, from a program of its own. file: None: nothing is watched."""
    watcher = subprocess.Popen([sys.executable, __file__, str(file), f"--gpu={gpu}"]) if file else None
    try:
        yield
    finally:
        if watcher:
            watcher.terminate()
            watcher.wait()


def host_gib() -> float:
    """What other programs could not have of the machine's memory; what a program has read of files they could."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    return (kib["MemTotal"] - kib["MemAvailable"]) / 2**20


def rows_of(file: Path, begin: float, end: float) -> list[Row]:
    """begin, end: Unix seconds."""
    with file.open() as lines:
        rows = [Row(float(at), int(use), float(gib), float(watt), float(host)) for at, use, gib, watt, host in csv.reader(lines)]
    return [row for row in rows if begin <= row.at <= end]


def idle_frac(rows: list[Row]) -> float:
    """The share of the time in which no kernel ran.

    The driver's utilisation is already a share: of its last window (nvmlUtilization_t: 1/6 to 1 s; on an H200 0.2 s). So rows of 0 alone
    would miss each pause that is shorter than a window.
    """
    return 1 - sum(row.utilisation for row in rows) / len(rows) / 100


def idle_s(file: Path, moments: Sequence[float]) -> list[float]:
    """Seconds in which no kernel ran, between each two moments (Unix seconds)."""
    return [(end - begin) * idle_frac(rows_of(file, begin, end)) for begin, end in pairwise(moments)]


def main() -> None:
    import pynvml

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", type=int, default=0, help="number, as the driver counts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(options.gpu)
    with options.file.open("w") as file:
        while True:
            used = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
            use, watt = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu, pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000
            file.write(f"{time.time():.3f},{use},{used:.2f},{watt:.0f},{host_gib():.2f}\n")
            file.flush()
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
