"""What this machine computes on, and how engine and trainer share it."""

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from infra.config import EngineConfig, HandOver
from infra.settings import settings

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


def engine_gpus(count: int) -> list[int]:
    """The driver's numbers of the GPUs that an engine of so many ranks will use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    listed = [int(word) for word in visible.split(",")] if re.fullmatch(r"\d+(,\d+)*", visible) else range(count)
    return list(settings().engine_gpus or listed)[:count]


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
    """The plan that the engine's section says; where it says `auto`, `infra.hand_over` chooses, and here is what needs no figures.

    Raises:
        ValueError: for a plan that this machine cannot carry out.
    """
    if config.kind == "scripted":
        return Plan("resident", "a scripted engine holds nothing")
    if config.hand_over == "split" and not settings().is_split:
        raise ValueError(
            "engine.hand_over 'split' needs GPUs for each: set RATCHET_ENGINE_GPUS and RATCHET_TRAINER_GPUS, such as [0] and [1]"
        )
    if config.hand_over != "auto":
        rehearsed = ", rehearsed: without a GPU nothing is freed and the driver says nothing" if device() == "cpu" else ""
        return Plan(config.hand_over, f"chosen in engine.hand_over{rehearsed}")
    if device() == "cpu":
        return Plan("resident", "no GPU: the engine holds no device memory that it could release")
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
