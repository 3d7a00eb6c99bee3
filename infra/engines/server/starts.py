"""Where the time of an engine's start goes, by the server's own log; and its weights, read into the page cache meanwhile."""

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.engines.server.server_process import ServerState
from infra.processes import kernel_caches, logs
from infra.store.files import read_note, write_note

log = logging.getLogger(__name__)

COMPILED = "compiled_files"
IMPORTED = re.compile(r"^\[([-0-9]+ [0-9:]+)[^]]*\] .*Init torch distributed begin", re.MULTILINE)
"""SGLang's first line after the imports of all its processes."""
ELAPSED = {
    "distributed_s": re.compile(r"Init torch distributed ends\..*?elapsed=([0-9.]+) s"),
    "load_s": re.compile(r"Load weight end\..*?elapsed=([0-9.]+) s"),
    "graphs_s": re.compile(r"Capture [a-z ]+ (?:CUDA|cuda|NPU|CPU) ?graphs? end\..*?elapsed=([0-9.]+) s"),
}
"""Parts of a start of which SGLang 0.5.17 and 0.5.18 log the seconds."""
OTHER_RANK = re.compile(r"^\[[^]]* TP[1-9]")
"""A line of a rank that does the same as the first one at the same time."""
NUM_READERS = 4
CHUNK_BYTES = 2**24
MEMORY_SHARE = 0.5
"""Of the available memory, for the files that are read ahead."""


def parts_of(text: str, began_at: float, seconds: float) -> dict[str, float]:
    """Return the seconds of a start by part, which add up to it: what the log does not tell is `rest_s`.

    text: The server's log. began_at: When it was launched, in seconds since the epoch. seconds: From then until it answered.
    """
    found = {"s": seconds}
    text = "\n".join(line for line in text.splitlines() if not OTHER_RANK.match(line))
    if match := IMPORTED.search(text):
        at = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
        found["import_s"] = min(max(at - began_at, 0.0), seconds)  # the log has whole seconds
    for name, pattern in ELAPSED.items():
        if each := [float(match[1]) for match in pattern.finditer(text)]:
            found[name] = sum(each)
    return found | {"rest_s": max(0.0, seconds - sum(value for name, value in found.items() if name != "s"))}


class StartMeasures:
    """What one start of a server took, and which kernels were compiled in it."""

    def __init__(self, identity: str, versions: Mapping[str, str]) -> None:
        """versions: Those that decide the folder of its kernels."""
        self.identity, self.folder = identity, kernel_caches.folder_of(versions)
        self.began_at, self.begin = time.time(), time.monotonic()
        self.files = kernel_caches.files_in(self.folder)
        self.parts: dict[str, float] = {}

    def ready(self, state: ServerState) -> None:
        """Note that the server answers."""
        self.parts = parts_of(logs.beginning(state.log_path), self.began_at, time.monotonic() - self.begin)

    def figures(self) -> dict[str, float]:
        """Return seconds by part and the number of files that were compiled since the start, checks included.

        A start that compiles although one with equal model, flags and versions came before is logged as a warning.
        """
        made = kernel_caches.files_in(self.folder) - self.files
        started = self.folder / f"about-{self.identity}.json"
        came_before = read_note(started, dict[str, int]) is not None
        if self.folder.exists():
            write_note(started, {COMPILED: len(made)})
        shown = ", ".join(f"{name.removesuffix('_s')} {value:.1f} s" for name, value in self.parts.items() if name != "s")
        level = logging.WARNING if made and came_before else logging.INFO
        again = ", although it had started here before" if made and came_before else ""
        message = "the engine started in %.1f s (%s) and compiled %s%s; its kernels lie in %s"
        log.log(level, message, self.parts.get("s", 0.0), shown, kernel_caches.describe(made), again, self.folder)
        return self.parts | {COMPILED: float(len(made))}


@contextmanager
def read_ahead(folder: Path) -> Iterator[None]:
    """Read a model's weights into the page cache while the block runs, with several threads; engine and trainer find them there.

    Nothing is read if the weights would take more than half of the available memory. What is unread when the block ends stays unread.
    """
    files = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size, reverse=True)
    is_over = threading.Event()
    if sum(path.stat().st_size for path in files) > MEMORY_SHARE * psutil.virtual_memory().available:
        files = []
    with ThreadPoolExecutor(NUM_READERS) as threads:
        for number in range(NUM_READERS if files else 0):
            threads.submit(_read, files, number, is_over)
        try:
            yield
        finally:
            is_over.set()


def _read(files: list[Path], number: int, is_over: threading.Event) -> None:
    """Read every NUM_READERSth chunk of the files."""
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            for begin in range(number * CHUNK_BYTES, path.stat().st_size, NUM_READERS * CHUNK_BYTES):
                if is_over.is_set():
                    return
                os.preadv(stream.fileno(), [buffer], begin)
