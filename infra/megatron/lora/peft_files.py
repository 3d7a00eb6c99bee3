"""The files of an adapter version: what is in them, and whether those of a job are the right ones. Tensors are whole, named as in PEFT.

adapter_config.json, adapter_model.safetensors   loadable by Hugging Face PEFT
state/{exp_avg,exp_avg_sq}.safetensors           Adam's moments; see infra.megatron.protocol.optimizer_files
"""

import json
from pathlib import Path

from infra.config import LoraConfig
from infra.megatron.model.base_weights import Checkpoint
from infra.megatron.protocol.adapter_config import peft_config
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TrainJob
from infra.megatron.protocol.optimizer_files import num_steps, places
from infra.models.architecture import Architecture, linear_shapes
from infra.store import digests

PEFT_PREFIX = "base_model.model."


def adapter_shapes(a: Architecture, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """PEFT name -> full shape of every tensor of an adapter."""
    shapes = {}
    for name, (out, into) in linear_shapes(a).items():
        if name.rsplit(".", 1)[1] in lora.target_modules:
            shapes[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (lora.rank, into)
            shapes[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (out, lora.rank)
    return shapes


def check_adapter(job: TrainJob, a: Architecture, *, reads_tensors: bool = True) -> None:
    """Raises ValueError if the adapter to start from is incomplete or not the one that the job describes.

    reads_tensors: Whether the job will read the files' tensors. If so, their names, shapes and number of steps are checked too.
    """
    folder = job.adapter_path
    if folder is None:
        if job.adapter_version != 0 or job.adapter_sha256 != "base":
            raise ValueError(f"job: adapter_version {job.adapter_version} ({job.adapter_sha256}) needs an adapter_path")
        if job.num_optimizer_steps:
            raise ValueError(f"job: num_optimizer_steps {job.num_optimizer_steps} needs an adapter_path, a first adapter has 0")
        return
    for path in (folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS, *(path for path, _ in places(folder).values())):
        if not path.is_file():
            why = "; without its optimizer state training cannot go on from it, only from a version that has kept its own"
            is_state = path.parent != folder
            raise ValueError(f"adapter {folder} has no {path.relative_to(folder)}{why if is_state else ''}")
    if (found := digests.sha256_of(folder / ADAPTER_WEIGHTS)) != job.adapter_sha256:
        raise ValueError(f"adapter {folder} has SHA-256 {found}, the job says {job.adapter_sha256}")
    _check_config(job, folder)
    if reads_tensors:
        _check_tensors(job, folder, a)


def _check_tensors(job: TrainJob, folder: Path, a: Architecture) -> None:
    shapes, moments = adapter_shapes(a, job.trainer.lora), places(folder).values()
    check_tensors(folder / ADAPTER_WEIGHTS, shapes)
    for path in dict.fromkeys(path for path, _ in moments):
        prefixes = [prefix for other, prefix in moments if other == path]
        check_tensors(path, {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()})
    if (steps := num_steps(folder)) != job.num_optimizer_steps:
        raise ValueError(
            f"adapter {folder}: its optimizer has taken {steps} steps, the job says num_optimizer_steps {job.num_optimizer_steps}"
        )


def _check_config(job: TrainJob, folder: Path) -> None:
    found, expected = json.loads((folder / ADAPTER_CONFIG).read_bytes()), peft_config(job.base_model_id, job.trainer.lora)
    for key in ("r", "lora_alpha", "target_modules"):  # the base model is known by its digest, wherever it lies
        if found.get(key) != expected[key]:
            raise ValueError(f"adapter {folder} is another one: its {key} is {found.get(key)!r}, the job's is {expected[key]!r}")


def check_tensors(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """Check an adapter's file by its header. shapes: by name, those that it must have, and no others. Raises ValueError for the first difference."""
    with Checkpoint(path) as checkpoint:
        if different := sorted(set(shapes) ^ set(checkpoint.files)):
            missing = different[0] in shapes
            raise ValueError(f"{path}: {'no tensor' if missing else 'unexpected tensor'} {different[0]} ({len(different)} such)")
        for name, shape in shapes.items():
            if (found := tuple(checkpoint[name].get_shape())) != shape:
                raise ValueError(f"{path}: {name} has shape {found}, should be {shape}")
