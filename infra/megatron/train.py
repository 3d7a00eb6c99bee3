"""The program's work once the input is known to be good: build, load, one step, write; result.json last."""

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch
import torch.distributed as dist

from infra import files
from infra.megatron import canary, checkpoint, layout, lora, model, optimizer, weights
from infra.megatron.checks import Inputs
from infra.megatron.job import CANARY, TrainJob, TrainResult
from infra.megatron.layout import Layout
from infra.megatron.step import NotFinite, train_step

log = logging.getLogger(__name__)

PACKAGES = ("torch", "megatron-core", "safetensors")


class Phases(dict[str, float]):
    """Seconds by phase, in the order of the phases."""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self[name] = time.perf_counter() - begin
        log.info("%s  %.1f s", name, self[name])


def train(job: TrainJob, inputs: Inputs, phases: Phases) -> None:
    """One job, on all ranks together. Writes nothing before the step is known to be good."""
    a = inputs.architecture
    with phases.measured("build"):
        place = layout.start(job)
        net = model.build(a, job.trainer, place)
    with phases.measured("load"):
        weights.load_base(net, job.model_path, a, place)
        shards = lora.attach(net, a, job.trainer.lora, place, sequence_parallel=job.trainer.sequence_parallel)
        adam = optimizer.build(shards, job.trainer)
        checkpoint.load(job, a, shards, adam, place)
    with phases.measured("train"):
        try:
            metrics = train_step(net, shards, adam, inputs.batch, job.trainer, place)
        except NotFinite:
            # All ranks have the same metrics, so all are here. After any other error a rank may wait for its peers for ever.
            layout.stop()
            raise
    with phases.measured("export"):
        song = canary.sing(net, inputs.batch, place)
        checkpoint.save(job, shards, adam, place)
    peak_gib = _peak_memory_gib(place)
    if place.rank == 0:
        files.write_json(job.output_dir / CANARY, song.model_dump())
        result = TrainResult(
            adapter_version=job.adapter_version + 1,
            num_optimizer_steps=optimizer.num_steps(adam),
            metrics=metrics,
            seconds=phases,
            peak_memory_gib=peak_gib,
            versions={name: version(name) for name in PACKAGES},
        )
        files.write_json(job.result_path, result.model_dump())
    dist.barrier()
    layout.stop()


def _peak_memory_gib(place: Layout) -> float:
    """Largest over ranks; what the driver sees of the allocator on a GPU, else the process's resident set."""
    on_gpu = place.device.type == "cuda"
    num_bytes = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.tensor(num_bytes / 2**30, dtype=torch.float64, device=place.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()
