"""What this machine computes on, and how engine and trainer share it."""

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from infra.config import EngineConfig, HandOver

Device = Literal["cpu", "cuda"]


@cache
def device() -> Device:
    """cuda where NVIDIA's driver answers, else cpu."""
    return "cuda" if num_gpus() else "cpu"


@cache
def num_gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


@cache
def processor() -> str:
    """The kind of GPU, or of CPU where there is none: `NVIDIA H200`, `x86_64 Intel(R) Xeon(R) ...`."""
    if device() == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[0].strip()
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model}".strip()


def dtype_of(choice: str) -> Literal["float32", "bfloat16"]:
    """Resolve `auto`."""
    if choice == "auto":
        return "float32" if device() == "cpu" else "bfloat16"
    return "float32" if choice == "float32" else "bfloat16"


class Plan(NamedTuple):
    hand_over: HandOver
    reason: str


def plan(config: EngineConfig) -> Plan:
    """How the engine makes room for the trainer.

    Raises:
        ValueError: for a plan that this machine cannot carry out.
    """
    if config.kind == "scripted":
        return Plan("resident", "a scripted engine holds nothing")
    if device() == "cpu":
        if config.hand_over not in ("auto", "resident"):
            raise ValueError(
                f"engine.hand_over {config.hand_over!r} needs a GPU; on a CPU the engine has nothing that it could release: use 'auto'"
            )
        return Plan("resident", "no GPU: the engine holds no device memory that it could release")
    if config.hand_over != "auto":
        return Plan(config.hand_over, "chosen in engine.hand_over")
    return Plan("offload", "GPU shared with the trainer: weights are backed up on the host, so that nothing is lost at the wake")


def gpu_memory_used_bytes() -> int:
    """By the driver's word, over all GPUs; 0 where there is none."""
    return _gpu_memory_bytes("used")


def gpu_memory_total_bytes() -> int:
    """Of all GPUs; 0 where there is none."""
    return _gpu_memory_bytes("total")


def _gpu_memory_bytes(what: Literal["used", "total"]) -> int:
    if device() == "cpu":
        return 0
    query = ["nvidia-smi", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits"]
    listing = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    return sum(int(line) for line in listing.stdout.split()) * 2**20
