"""What this machine computes on, and how engine and trainer share it."""

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from infra.config import ColocationPlan, EngineConfig, TrainerConfig
from infra.config.sections.engine import MAX_REPLICAS
from infra.machine import nvml
from infra.settings import settings

Device = Literal["cpu", "cuda"]


@cache
def device() -> Device:
    """cuda if NVML finds a GPU driver, else cpu."""
    return "cuda" if num_gpus() else "cpu"


def num_gpus() -> int:
    """Number of GPUs that this process may use."""
    return len(nvml.numbers())


def engine_gpus(count: int, replica: int = 0) -> list[int]:
    """NVML's numbers of the GPUs that a replica of the engine with `count` ranks will use. Replicas share GPUs if there are too few."""
    gpus = list(settings().engine_gpus or nvml.numbers())
    begin = replica * count % max(1, len(gpus))
    return [*gpus[begin:], *gpus[:begin]][:count]


def trainer_gpus(config: TrainerConfig) -> list[int]:
    """NVML's numbers of the GPUs that the trainer sees; empty: all that this process may use."""
    if settings().trainer_gpus or not config.first_gpu:
        return list(settings().trainer_gpus)
    return list(nvml.numbers())[config.first_gpu :][: config.num_processes]


def num_replicas(config: EngineConfig) -> int:
    """Servers that the engine consists of on this machine."""
    if config.replicas is not None:
        return config.replicas
    return min(MAX_REPLICAS, max(1, len(settings().engine_gpus or nvml.numbers()) // config.tensor_parallel))


def replicas_per_gpu(config: EngineConfig) -> int:
    """The most replicas that share one of the engine's GPUs; 1 on a CPU, and on a cluster, where none is shared."""
    num_gpus = 0 if settings().cluster_address else len(settings().engine_gpus or nvml.numbers())
    return -(-num_replicas(config) * config.tensor_parallel // num_gpus) if num_gpus else 1


@cache
def processor() -> str:
    """Return the kind of GPU, or of CPU if there is no GPU: `NVIDIA H200`, `x86_64 Intel(R) Xeon(R) ...`."""
    if device() == "cuda":
        return nvml.name(nvml.numbers()[0])
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model}".strip()


def gpu_versions(numbers: Sequence[int] = ()) -> dict[str, str]:
    """Return the name of these GPUs (gpu) and the driver's version (driver), as reported by NVML; empty on a CPU.

    numbers: None given: all that this process may use.
    """
    if not nvml.numbers():
        return {}
    names = sorted({nvml.name(number) for number in numbers or nvml.numbers()})
    return {"gpu": ", ".join(names), "driver": nvml.version()}


PEAK_BF16_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense peak from the vendor's data sheet, by a part of the GPU's name in NVML. The first match counts."""


def peak_flops(gpu: str) -> float | None:
    """Return a GPU's peak in bfloat16, in FLOP/s; None for one that is not in the table."""
    return next((flops for name, flops in PEAK_BF16_FLOPS.items() if name in gpu), None)


def dtype_of(choice: str) -> Literal["float32", "bfloat16"]:
    """Resolve `auto`."""
    if choice == "auto":
        return "float32" if device() == "cpu" else "bfloat16"
    return "float32" if choice == "float32" else "bfloat16"


SPLIT_REASON = "engine and trainer have GPUs of their own (RATCHET_ENGINE_GPUS, RATCHET_TRAINER_GPUS)"


class Plan(NamedTuple):
    colocation: ColocationPlan
    reason: str
    microbatches: str = ""
    """Size of the trainer's micro-batches, and where it comes from."""
    judge: str = ""
    """Where a second model judges: which model holds the GPUs when, with sizes."""


def plan(config: EngineConfig) -> Plan:
    """Return the plan of the engine's section. For `auto`, `infra.colocation.plans` chooses; only choices without figures are made here."""
    if config.kind == "scripted":
        return Plan("keep_weights", "a scripted engine holds nothing")
    if config.colocation != "auto":
        rehearsed = ", rehearsed: without a GPU nothing is freed and the driver says nothing" if device() == "cpu" else ""
        return Plan(config.colocation, f"chosen in engine.colocation{rehearsed}")
    if device() == "cpu":
        return Plan("keep_weights", "no GPU: the engine holds no device memory that it could release")
    if settings().is_split:
        return Plan("separate_gpus", SPLIT_REASON)
    return Plan("offload", "GPU shared with the trainer: weights are backed up on the host, so that nothing is lost at the wake")


def gpu_memory_used_bytes() -> int:
    """Memory in use as reported by NVML, over all GPUs; 0 without a GPU."""
    return sum(gpu.used_bytes for gpu in nvml.read().gpus)


def gpu_memory_total_bytes() -> int:
    """Memory of all GPUs; 0 without a GPU."""
    return sum(gpu.total_bytes for gpu in nvml.read().gpus)
