"""The sizes of a machine that plans are made by."""

from typing import NamedTuple

import psutil

from infra.machine import nvml
from infra.settings import settings

GIB = 2**30


class Machine(NamedTuple):
    is_gpu: bool
    gpu_bytes: int
    """Memory of the smallest GPU."""
    is_split: bool
    host_bytes: int
    """Memory of the host."""
    judge_bytes: int = 0
    """Memory of each GPU that the sleeping server of a second model that judges keeps."""
    model_files_bytes: int = 0
    """Memory of the host that the model's files take; 0 if they lie on a disk."""
    judge_host_bytes: int = 0
    """Memory of the host that the sleeping server of a second model takes."""
    replicas_per_gpu: int = 1
    """The most replicas of the engine that share a GPU."""


def this_machine() -> Machine:
    """Return the sizes of this machine that plans are made by."""
    gpus = nvml.read().gpus
    smallest = min((gpu.total_bytes for gpu in gpus), default=0)
    return Machine(bool(gpus), smallest, settings().is_split, psutil.virtual_memory().total)
