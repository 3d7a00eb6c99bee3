"""Adapter and optimizer state to and from files that know no layout, byte for byte repeatable; see infra.megatron.adapter."""

from pathlib import Path

import safetensors.torch
import torch

from infra import files
from infra.megatron import lora, optimizer
from infra.megatron.adapter import MOMENTS, adapter_shapes, peft_config
from infra.megatron.architecture import Architecture
from infra.megatron.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, OPTIMIZER, OPTIMIZER_STEPS, TrainJob
from infra.megatron.layout import Layout
from infra.megatron.lora import Shard
from infra.megatron.weights import Checkpoint


@torch.no_grad()
def load(job: TrainJob, a: Architecture, shards: list[Shard], adam: torch.optim.AdamW, layout: Layout) -> None:
    """Fill this rank's shards and optimizer state, or give version 0 its first values. Any layout may have written the files."""
    if job.adapter_path is None:
        lora.initialize(shards, adapter_shapes(a, job.trainer.lora), layout, job.seed)
        return
    with Checkpoint(job.adapter_path / ADAPTER_WEIGHTS) as weights:
        for shard in shards:
            shard.parameter.copy_(lora.read_shard(weights, shard, layout))
    with Checkpoint(job.adapter_path / OPTIMIZER) as state:
        values = {which: [lora.read_shard(state, shard, layout, prefix=f"{which}.") for shard in shards] for which in MOMENTS}
    optimizer.restore(adam, shards, values, job.num_optimizer_steps)


@torch.no_grad()
def save(job: TrainJob, shards: list[Shard], adam: torch.optim.AdamW, layout: Layout) -> None:
    """Collective; rank 0 writes adapter version adapter_version + 1 into output_dir."""
    weights = lora.full_tensors(shards, [shard.parameter for shard in shards], layout)
    state = {
        f"{which}.{name}": tensor
        for which in MOMENTS
        for name, tensor in lora.full_tensors(shards, optimizer.moments(adam, shards, which), layout).items()
    }
    if layout.rank != 0:
        return
    _write(job.output_dir / OPTIMIZER, state, OPTIMIZER_STEPS, str(optimizer.num_steps(adam)))
    _write(job.output_dir / ADAPTER_WEIGHTS, weights, "format", "pt")
    files.write_json(job.output_dir / ADAPTER_CONFIG, peft_config(job))


def _write(path: Path, tensors: dict[str, torch.Tensor], key: str, value: str) -> None:
    """One key of metadata: safetensors does not sort them. Straight to the file: its bytes made first take several times as long."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    files.write_by(
        lambda partial: safetensors.torch.save_file(tensors, partial, {key: value}), path, what=f"{size} bytes of tensors"
    )
