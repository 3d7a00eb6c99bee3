"""Adapter and optimizer state outside the model: while it is written to files, and between two jobs of a persistent trainer.

    job k: step -> HostState -> files, with digests          kept: (digests, tensors)
    job k+1 names the same digests: takes the tensors, and nothing is read from the disk

A tensor is cached on the device (trainer.sleep_weights gpu) or in the host memory from which files are written (host). Each rank caches what it
would read from the files: replicated values are rank 0's, bit for bit. The ranks need not agree: taking and reading are not collective.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from infra.config import LoraConfig
from infra.megatron.checkpoint import safetensors_writer
from infra.megatron.checkpoint.pinned_memory import HostMemory, Kind
from infra.megatron.checkpoint.safetensors_writer import Body
from infra.megatron.lora.layers import Shard
from infra.megatron.model.parallel import ParallelContext, copy_from_first, gather
from infra.megatron.program import optimizer
from infra.megatron.protocol.job import ADAPTER_WEIGHTS, ENGINE_WEIGHTS, TrainJob
from infra.megatron.protocol.optimizer_files import MOMENTS

WEIGHTS = "weights"
Values = dict[str, list[Tensor]]
"""WEIGHTS and each of MOMENTS -> this rank's values of its shards, in order."""


class Content(NamedTuple):
    """Identifies the content of files: if it is equal, so is every value read from them."""

    weights_sha256: str
    moments_sha256: dict[str, str]
    num_optimizer_steps: int
    lora: LoraConfig


class Kept(NamedTuple):
    content: Content
    values: Values
    is_on_device: bool
    """Whether the values are on the device. If so, the next job uses them without a copy."""


def needed_by(job: TrainJob) -> Content:
    """Return the state that a job starts from, by the digests that it names."""
    return Content(job.adapter_sha256, job.moments_sha256, job.num_optimizer_steps, job.trainer.lora)


def written_by(job: TrainJob, sha256: dict[str, str], num_optimizer_steps: int) -> Content:
    """sha256: Digests by file name."""
    moments = {which: sha256[name] for which, name in MOMENTS.items()}
    return Content(sha256[ADAPTER_WEIGHTS], moments, num_optimizer_steps, job.trainer.lora)


def values_of(shards: list[Shard], adam: torch.optim.AdamW) -> Values:
    """Return the values on the device, without a copy."""
    return {WEIGHTS: [shard.parameter.detach() for shard in shards]} | {
        which: optimizer.moments(adam, shards, which) for which in MOMENTS
    }


# Perf: phase `adapter` 87 -> 22 ms where tensors are kept, not read from files (160 MB, CPU, docs/history/log.md).
def go_on_from(kept: Kept, shards: list[Shard], adam: torch.optim.AdamW) -> None:
    """Use cached values as this job's own, which it may change."""

    def own(value: Tensor, shard: Shard) -> Tensor:
        return value if kept.is_on_device else torch.empty_like(shard.parameter.data).copy_(value, non_blocking=True)

    values = {which: [own(value, s) for value, s in zip(each, shards, strict=True)] for which, each in kept.values.items()}
    for shard, value in zip(shards, values[WEIGHTS], strict=True):
        shard.parameter.data = value
    optimizer.restore(adam, shards, values, kept.content.num_optimizer_steps)


def make_equal(values: Values, shards: list[Shard], layout: ParallelContext) -> None:
    """Make replicated values equal to those in the files. Collective.

    Without a file between two steps, nothing else would correct a last bit in which ranks differ.
    """
    for each in values.values():
        held = list(zip(shards, each, strict=True))
        copy_from_first([value for shard, value in held if not shard.is_expert], layout.dp_group)
        copy_from_first([value for shard, value in held if not shard.is_expert and shard.cut_dim is None], layout.tp_group)
        copy_from_first([value for shard, value in held if shard.is_expert], layout.expert_dp_group)


class HostState:
    """Host memory of the state. On rank 0: whole tensors, as they are written. On other ranks: their values if they are cached here."""

    def __init__(
        self, shards: list[Shard], layout: ParallelContext, *, engine_dtype: torch.dtype, keeps: bool, locks: bool
    ) -> None:
        """engine_dtype: Of the adapter's file for an engine: in which the trainer computes with it, so that the engine gets the same values."""
        self.layout, self.made_for = layout, (_shapes(shards), engine_dtype)
        self.is_writer, self.keeps = layout.rank == 0, keeps
        # As they follow each other in a file: what lies together there is written in one go (infra/megatron/checkpoint/safetensors_writer.py).
        self.order = sorted(range(len(shards)), key=lambda i: shards[i].name)
        shapes = [self._whole_shape(shards[i]) if self.is_writer else shards[i].parameter.shape for i in self.order]
        kinds = [Kind(shape, torch.float32) for shape in shapes]
        blocks = [kinds] * (1 + len(MOMENTS)) if self.is_writer or keeps else []
        self.engine_order: list[int] = []
        """Of the tensors in the engine's file, as they follow each other; empty if there is none, or the float32 values are used."""
        if self.is_writer and any(shard.is_expert for shard in shards) and engine_dtype is not torch.float32:
            self.engine_order = sorted(self.order, key=lambda i: shards[i].stacked_name)
            blocks = [*blocks, [Kind(self._whole_shape(shards[i]), engine_dtype) for i in self.engine_order]]
        self.memory = HostMemory(blocks, locks=locks)
        self._bodies: dict[str, Body] = {}

    def fits(self, shards: list[Shard], engine_dtype: torch.dtype) -> bool:
        return (_shapes(shards), engine_dtype) == self.made_for

    def fill(self, values: Values, shards: list[Shard]) -> None:
        """Copy the values from the device, which rounds those for the engine. The content does not change before the next call. Collective."""
        for which, targets in self._by_kind().items():
            if self.is_writer or self.layout.tp_size * self.layout.ep_size > 1:
                # Perf: rounded by the host 1.9 s later: export 2.7 -> 1.5 s (30B-A3B, H200, docs/results/speed.md).
                for_engine = [self._for_engine()] if which == WEIGHTS and self.engine_order else []
                self._gather(values[which], shards, [targets, *for_engine] if self.is_writer else [])
            if self.keeps and not self.is_writer:
                for target, value in zip(targets, values[which], strict=True):
                    target.copy_(value, non_blocking=True)
        if self.layout.device.type == "cuda":
            torch.cuda.synchronize()

    # Perf: bodies made once, before the canary: export 0.38 -> 0.31 s (7B, H200, docs/results/h200-hand-over.md).
    def body(self, which: str, shards: list[Shard]) -> Body:
        """Return the body of the file of whole tensors, by their PEFT names; on rank 0. It contains the values filled in last."""
        assert self.is_writer
        if which not in self._bodies:
            self._bodies[which] = safetensors_writer.body_of(self._named(which, shards), in_order=True)
        return self._bodies[which]

    def _named(self, which: str, shards: list[Shard]) -> dict[str, Tensor]:
        """As they lie in memory, so that a file is written and hashed in one go: sorted by name, 36,864 tensors of a mixture's experts lie apart."""
        full: dict[str, Tensor] = {}
        values = self._by_kind()[which]
        for i in self.order:
            shard, whole = shards[i], values[i]
            full.update(zip(shard.names_of_whole(len(whole)), whole if shard.is_expert else [whole], strict=True))
        return full

    def engine_body(self, shards: list[Shard]) -> Body:
        """Return the body of the adapter's file for an engine, on rank 0: as filled in last, with the experts of a layer in one tensor.

        `...experts.{gate,up,down}_proj.lora_A.weight` [E, r, in] and `lora_B` [E, out, r], as SGLang 0.5.17 and 0.5.18 read them (lora/lora.py,
        lora/mem_pool.py): 288 tensors at 30B-A3B, not 36,864. The other tensors have their PEFT names.
        """
        assert self.is_writer
        if ENGINE_WEIGHTS not in self._bodies:
            values = self._for_engine() if self.engine_order else self._by_kind()[WEIGHTS]
            self._bodies[ENGINE_WEIGHTS] = safetensors_writer.body_of(
                {shard.stacked_name: whole for shard, whole in zip(shards, values, strict=True)}
            )
        return self._bodies[ENGINE_WEIGHTS]

    def mine(self, shards: list[Shard]) -> Values:
        """Return this rank's values, as views."""
        assert self.keeps
        if not self.is_writer:
            return self._by_kind()
        return {
            which: [self._share(shard, whole) for shard, whole in zip(shards, targets, strict=True)]
            for which, targets in self._by_kind().items()
        }

    def _by_kind(self) -> Values:
        """Return the values by kind, in the order of the shards."""
        tensors, count = self.memory.ready(), len(self.order)
        places = sorted(range(count), key=self.order.__getitem__)
        return {
            which: [tensors[begin + place] for place in places] if tensors else []
            for begin, which in zip(itertools.count(0, count), (WEIGHTS, *MOMENTS), strict=False)
        }

    def _for_engine(self) -> list[Tensor]:
        """Return the engine's values, in the order of the shards."""
        in_file = dict(zip(self.engine_order, self.memory.ready()[-len(self.engine_order) :], strict=True))
        return [in_file[i] for i in range(len(in_file))]

    def _whole_shape(self, shard: Shard) -> torch.Size:
        shape = list(shard.parameter.shape)
        if shard.is_expert:
            shape[0] *= self.layout.ep_size
        elif shard.cut_dim is not None:
            shape[shard.cut_dim] *= self.layout.tp_size
        return torch.Size(shape)

    def _share(self, shard: Shard, whole: Tensor) -> Tensor:
        if shard.is_expert:
            return whole.chunk(self.layout.ep_size)[self.layout.ep_rank]
        return whole if shard.cut_dim is None else whole.chunk(self.layout.tp_size, shard.cut_dim)[self.layout.tp_rank]

    def _gather(self, values: list[Tensor], shards: list[Shard], copies: list[list[Tensor]]) -> None:
        """Copy whole tensors to each of the copies, in its type: a GPU converts before it sends."""
        dense = [i for i, shard in enumerate(shards) if not shard.is_expert]
        experts = [i for i, shard in enumerate(shards) if shard.is_expert]
        dense_by_rank = gather([values[i] for i in dense], self.layout.tp_group)
        experts_by_rank = gather([values[i] for i in experts], self.layout.ep_group)
        for targets in copies:
            for place, i in enumerate(dense):
                parts, dim = [part[place] for part in dense_by_rank], shards[i].cut_dim
                targets[i].copy_(parts[0] if dim is None else torch.cat(parts, dim), non_blocking=True)
            for place, i in enumerate(experts):
                for target, part in zip(targets[i].chunk(self.layout.ep_size), experts_by_rank, strict=True):
                    target.copy_(part[place], non_blocking=True)


def _shapes(shards: list[Shard]) -> list[tuple[str, torch.Size]]:
    return [(shard.name, shard.parameter.shape) for shard in shards]
