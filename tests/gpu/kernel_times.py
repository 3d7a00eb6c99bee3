"""Where a decoding step's time goes on the GPU, by the engine's own profiler: kernels by kind, and the time in which none runs."""

import gzip
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from infra.engines.server import server_process

NUM_STEPS = 10
WAIT_S = 90.0
KINDS = {
    "LoRA": r"lora|sgmv|shrink|expand_kernel",
    "attention": r"flash|fmha|attn|attention|paged|prepare_varlen",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|gemv",
    "sampling, log-probabilities": r"softmax|multinomial|sample|topk|sort|argmax|gumbel|logprob|cumsum|scan",
}
"""By the first that a kernel's name matches."""
REST = "the rest"

Event = dict[str, Any]


def profiled(rollout: Callable[[], object], folder: Path, *, after_s: float) -> dict[str, float]:
    """Milliseconds of one decoding step in the middle of a rollout, by kind of kernel.

    rollout: Of one length for all samples, so that all of them are under way after so many seconds.

    Raises:
        TimeoutError: if no trace was written.
    """
    state = server_process.recorded()
    assert state is not None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    under_way = threading.Thread(target=rollout)
    under_way.start()
    time.sleep(after_s)
    asked = {"output_dir": str(folder), "num_steps": NUM_STEPS, "activities": ["GPU"]}
    server_process.post(state.url, "/start_profile", asked, WAIT_S)
    try:
        return by_kind(_trace(folder), NUM_STEPS)
    finally:
        under_way.join()


def _trace(folder: Path) -> list[Event]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for path in folder.rglob("*.json*"):
            try:
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                return list(orjson.loads(data)["traceEvents"])
            except (EOFError, OSError, ValueError):  # it is still being written
                pass
        time.sleep(0.5)
    raise TimeoutError(f"no trace in {folder} after {WAIT_S:g} s")


def by_kind(events: Iterable[Event], num_steps: int) -> dict[str, float]:
    """Milliseconds a step: of each kind's kernels, of none (`no kernel`), and of all (`step`). Raises ValueError where there is no kernel."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise ValueError("the trace has no GPU kernel")
    found: dict[str, float] = defaultdict(float)
    for event in kernels:
        found[kind_of(event["name"])] += event["dur"] / 1e3 / num_steps
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in kernels]
    whole = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e3 / num_steps
    return {
        name: round(ms, 3)
        for name, ms in (*found.items(), ("no kernel", whole - busy_us(spans) / 1e3 / num_steps), ("step", whole))
    }


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower())), REST)


def busy_us(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
