"""Write and read adapter and optimizer state, byte for byte repeatable, in files without a layout; see infra.megatron.lora.peft_files."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from infra.megatron.checkpoint import adapter_state, safetensors_writer
from infra.megatron.checkpoint.adapter_state import WEIGHTS, HostState, Kept
from infra.megatron.checkpoint.safetensors_writer import Body
from infra.megatron.lora import layers as lora
from infra.megatron.lora.layers import Shard
from infra.megatron.lora.peft_files import adapter_shapes
from infra.megatron.model.base_weights import Checkpoint
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.program import optimizer
from infra.megatron.protocol import optimizer_files
from infra.megatron.protocol.adapter_config import peft_config
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ENGINE_CONFIG, ENGINE_WEIGHTS, TrainJob
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.models.architecture import Architecture
from infra.store import digests, files
from infra.store.digests import Digest

log = logging.getLogger(__name__)


@torch.no_grad()
def load(
    job: TrainJob,
    a: Architecture,
    shards: list[Shard],
    adam: torch.optim.AdamW,
    layout: ParallelContext,
    kept: Kept | None = None,
) -> None:
    """Fill this rank's shards and optimizer state, or initialize version 0. Any layout may have written the files.

    kept: The cached content of the files, if this program has it.
    """
    if job.adapter_path is None:
        lora.initialize(shards, adapter_shapes(a, job.trainer.lora), layout, job.seed)
        zeros = {which: [torch.zeros_like(shard.parameter) for shard in shards] for which in MOMENTS}
        optimizer.restore(adam, shards, zeros, 0)  # as AdamW would do, but before there are activations between them
        return
    if kept:
        log.info("adapter %d and its optimizer state: kept", job.adapter_version)
        adapter_state.go_on_from(kept, shards, adam)
        return
    log.info("adapter %d and its optimizer state: read from %s", job.adapter_version, job.adapter_path)
    with Checkpoint(job.adapter_path / ADAPTER_WEIGHTS) as weights:
        for shard in shards:
            shard.parameter.copy_(lora.read_shard(weights, shard, layout))
    values: adapter_state.Values = {}
    for which, (path, prefix) in optimizer_files.places(job.adapter_path).items():
        with Checkpoint(path) as file:
            values[which] = [lora.read_shard(file, shard, layout, prefix=prefix) for shard in shards]
    optimizer.restore(adam, shards, values, job.num_optimizer_steps)


class Saving:
    """Files that threads write while their tensors are on the host and the device is free for other programs. They are synced when the step is
    committed. Until then their digests show whether they are complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._threads = ThreadPoolExecutor()
        self._writing: dict[str, Future[Digest]] = {}
        self._small: list[Future[Path]] = []

    def write(self, name: str, body: Body, key: str, value: str) -> None:
        """Write a file. key, value: Its metadata."""
        self._writing[name] = self._threads.submit(self._written, self.folder / name, body, {key: value})

    def write_json(self, name: str, value: Any) -> None:  # Any: JSON
        self._small.append(self._threads.submit(files.write_note, self.folder / name, value))

    def finished(self) -> dict[str, Digest]:
        """Wait until all files are written. Returns the digests of the large ones by name. Raises the errors of the threads."""
        with self._threads:
            for each in self._small:
                each.result()
            return {name: writing.result() for name, writing in self._writing.items()}

    def _written(self, path: Path, body: Body, metadata: dict[str, str]) -> Digest:
        made: list[str] = []
        num_bytes = sum(map(len, body.parts))
        files.write_by(
            lambda partial: made.append(safetensors_writer.write(partial, body, metadata)),
            path,
            what=f"{num_bytes} bytes of tensors",
            # Perf: export 0.31 -> 0.15 s, since files reach the disk at the commit (7B, H200, docs/results/h200-hand-over.md).
            syncs=False,
        )
        return digests.trust_digest(path, Digest(sha256=made[0], stamp=digests.stamp_of(path)))


@torch.no_grad()
def save(job: TrainJob, shards: list[Shard], adam: torch.optim.AdamW, on_host: HostState) -> Saving:
    """Start to write adapter version adapter_version + 1 into output_dir, from the content of on_host. Rank 0 writes. Collective."""
    on_host.fill(adapter_state.values_of(shards, adam), shards)
    saving = Saving(job.output_dir)
    if on_host.is_writer:
        for which, name in MOMENTS.items():
            saving.write(name, on_host.body(which, shards), optimizer_files.NUM_STEPS, str(optimizer.num_steps(adam)))
        saving.write(ADAPTER_WEIGHTS, on_host.body(WEIGHTS, shards), "format", "pt")
        config = peft_config(job.base_model_id, job.trainer.lora)
        saving.write_json(ADAPTER_CONFIG, config)
        if any(shard.is_expert for shard in shards):
            saving.write(ENGINE_WEIGHTS, on_host.engine_body(shards), "format", "pt")
            saving.write_json(ENGINE_CONFIG, config)
    return saving
