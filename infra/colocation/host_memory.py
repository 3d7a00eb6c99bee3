"""How much memory of the host engine and trainer hold while the engine sleeps, and whether this host has that much.

Counted is what the kernel cannot take back: model files in a memory file system, and copies for the GPU. Files that it merely caches are not.

Facts of torch_memory_saver 0.0.10 (csrc/core.cpp, csrc/cpu_backup.h), which makes the engine's copy: a release copies the weights from the GPU
each time, also into a copy that was kept (`TMS_RETAIN_CPU_BACKUP=1`). So a kept copy saves page-locking and freeing memory, and a weight that
changed on the GPU comes back changed: the golden check sees it.
"""

from collections.abc import Mapping
from pathlib import Path

import psutil

from infra.colocation.trainer_memory import Model, num_lora_parameters, trainer_weight_bytes, weight_bytes
from infra.config import ColocationPlan, EngineConfig, TrainerConfig
from infra.machine import devices
from infra.settings import settings

GIB = 2**30
MAX_SHARE = 0.9
"""Share of the host's memory that may be held. The rest is for programs, data and cached files."""
STATE_BYTES = 12
"""Of an adapter's parameter in a persistent trainer: its value and Adam's two moments, float32, page-locked."""
IN_MEMORY = ("tmpfs", "ramfs")


def files_in_memory_bytes(folder: Path) -> int:
    """Size of a model's weight files that lie in a file system in memory, such as /dev/shm; 0 on a disk."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}

    def is_in_memory(path: Path) -> bool:
        return next((mounts[place] for place in path.parents if place in mounts), "") in IN_MEMORY

    files = [path.resolve() for path in folder.glob("*.safetensors")]  # those of a hub's cache are links
    return sum(path.stat().st_size for path in files if is_in_memory(path))


def held(
    plan: ColocationPlan, engine: EngineConfig, trainer: TrainerConfig, model: Model, *, files_bytes: int, judge_bytes: int = 0
) -> dict[str, int]:
    """Bytes of the host that are held while the engine sleeps, by what holds them.

    Each replica of the engine has a copy of its own; of a cluster's one is counted, as they are spread over its nodes. A sleeping trainer's
    weights count where trainer.sleep_weights asks for a copy; by itself it makes one only where there is room.

    files_bytes: Of the model's files in memory. judge_bytes: Of a sleeping judge's copy of its weights.
    """
    num_engines = 1 if settings().cluster_address else devices.num_replicas(engine)
    is_persistent = trainer.mode == "persistent"
    state = STATE_BYTES * num_lora_parameters(trainer.lora.rank, trainer.lora.target_modules, model.architecture)
    parts = {
        "the model's files in memory": files_bytes,
        "the sleeping engine's weights": num_engines * weight_bytes(engine.dtype, model) if plan == "offload" else 0,
        "the sleeping trainer's weights": trainer_weight_bytes(trainer, model) if _has_copy(trainer) else 0,
        "the trainer's adapter and optimizer state": state if is_persistent and trainer.sleep_weights != "disk" else 0,
        "the sleeping judge's weights": judge_bytes,
    }
    return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}


def _has_copy(trainer: TrainerConfig) -> bool:
    return trainer.mode == "persistent" and trainer.sleep_weights == "host"


def fits(parts: Mapping[str, int], host_bytes: int) -> bool:
    """Whether the parts, in bytes, are MAX_SHARE of the host's memory or less."""
    return sum(parts.values()) <= MAX_SHARE * host_bytes


def check(parts: Mapping[str, int], host_bytes: int) -> None:
    """Raises ValueError if more would be held than MAX_SHARE of the host's memory."""
    if not fits(parts, host_bytes):
        named = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in sorted(parts.items(), key=lambda part: -part[1]))
        raise ValueError(
            f"the host's memory of {host_bytes / GIB:.1f} GiB would hold {sum(parts.values()) / GIB:.1f} GiB ({named}), allowed are "
            f"{MAX_SHARE:.0%}: put the model on a disk if it lies in memory, or set trainer.sleep_weights to 'disk' or engine.colocation to "
            "'restart'"
        )
