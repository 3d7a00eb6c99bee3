"""The ranks and the frozen model of a job: made for one job, or kept from job to job in a persistent trainer.

    one-shot:  set up -> job -> tear down
    persistent: set up -> job -> sleep -> wake -> job -> sleep ...

A persistent trainer caches the adapter and optimizer state that it has written, under the digests of the files. A job that starts from
files with these digests uses the cache; any other job reads its files. So a job's result does not depend on earlier jobs. The cache is
emptied before a job starts, and a failed job leaves it empty.

State cached on the device stays in the adapter's layers, and the layers stay on the model. The next job with the same LoRA configuration
reuses the layers, whether it continues from their values or fills them again.
"""

import gc
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from infra.config import LoraConfig
from infra.megatron.checkpoint import adapter_state
from infra.megatron.checkpoint.adapter_state import HostState, Kept, Values
from infra.megatron.checkpoint.pinned_memory import HostCopy
from infra.megatron.checkpoint.shared_experts import ExpertWeights
from infra.megatron.lora import layers as lora
from infra.megatron.lora.layers import Shard
from infra.megatron.model import attention, base_weights, parallel
from infra.megatron.model import build as model
from infra.megatron.model.experts import fused_gemm
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.program.phase_timer import Phases
from infra.megatron.protocol.job import TrainJob, stage_of
from infra.models.architecture import Architecture
from infra.store.digests import Digest


class Asleep(NamedTuple):
    held_bytes: int
    """Device memory still held, over all ranks."""
    seconds: float
    """Time that falling asleep took."""


class Attached(NamedTuple):
    """The adapter's layers on the model."""

    lora: LoraConfig
    shards: list[Shard]


class TrainerSession:
    def __init__(self, *, stays: bool = False) -> None:
        self.stays = stays
        self.made_for: TrainJob | None = None
        self.net: nn.Module | None = None
        self.place: ParallelContext | None = None
        self.copy: HostCopy | None = None
        self.host_state: HostState | None = None
        self.kept: Kept | None = None
        self.attached: Attached | None = None
        self.asleep: Asleep | None = None
        self.experts: ExpertWeights | None = None
        """With trainer.share_experts."""

    def check(self, job: TrainJob) -> None:
        """Raises ValueError if the cached model is another one, or has another parallel layout."""
        if self.made_for is None:
            return
        kept, asked = stage_of(self.made_for), stage_of(job)
        if different := [name for name in kept if kept[name] != asked[name]]:
            raise ValueError(
                f"this persistent trainer was started with another {', '.join(different)} "
                f"({', '.join(kept[name] for name in different)}); the job needs a new one"
            )

    def holds(self, job: TrainJob) -> bool:
        """Whether the cached state is the one that a job starts from."""
        return self.kept is not None and self.kept.content == adapter_state.needed_by(job)

    def setup(self, job: TrainJob, a: Architecture, phases: Phases) -> tuple[nn.Module, ParallelContext]:
        """Return the frozen model on its device, and this rank's parallel context. Collective.

        Raises:
            UnusableExperts, EngineEnded: as infra.megatron.checkpoint.shared_experts has them.
            UnusableKernel: as infra.megatron.model.kernel_packages has it.
        """
        self.asleep = None
        if self.net is not None and self.place is not None:
            with phases.measured("wake"):
                self._wake(a)
                self._attach_experts(job)
            return self.net, self.place
        with phases.measured("build"):
            if self.place is not None:  # a job before was refused when its model was not whole yet
                parallel.stop()
            self.place = parallel.start(job)
            self._check_kernels(job, a)
            self.net = model.build(a, job.trainer, self.place)
        with phases.measured("load"):
            try:
                base_weights.load_base(self.net, job.model_path, a, self.place)
            except base_weights.UnusableBase:
                self.net = None  # no later job trains with it
                raise
        self.made_for = job
        if self.stays:
            # Modules and model are kept. A collection that scans all of them takes 0.2 s and holds Python's lock, at every sleep.
            # Perf: a collection at each sleep 0.38 s -> under 0.1 ms (433 000 objects, CPU, docs/history/log.md).
            gc.collect()
            gc.freeze()
        if self.keeps_on_device:
            torch.cuda.empty_cache()  # cached state must not lie in a large block left over from reading: it would hold the whole block
        if self.stays and self.place.device.type == "cuda" and job.trainer.sleep_weights != "gpu":
            self.copy = HostCopy(self.net, is_wanted=job.trainer.sleep_weights != "disk")
        if job.trainer.share_experts:
            self.experts = ExpertWeights(self.net, job.model_path, a, self.place)
            with phases.measured("load"):
                self._attach_experts(job)
        return self.net, self.place

    def _check_kernels(self, job: TrainJob, a: Architecture) -> None:
        assert self.place is not None
        device, dtype = self.place.device, model.base_dtype(job.trainer, self.place.device)
        attention.check(device, dtype, a.num_heads // self.place.tp_size, a.num_kv_heads // self.place.tp_size, a.head_dim)
        if a.experts:
            fused_gemm.check(device, dtype, a.hidden_size, 2 * a.experts.ffn_size)
            fused_gemm.check(device, dtype, a.experts.ffn_size, a.hidden_size)

    def _attach_experts(self, job: TrainJob) -> None:
        if self.experts:
            self.experts.attach(job.shared_experts)

    def check_experts(self) -> None:
        """Check at the end of the last backward pass that it computed with the experts of the model's files. Raises as `setup` does."""
        if self.experts:
            self.experts.check()

    @property
    def keeps(self) -> bool:
        """Whether adapter and optimizer state are cached, with the host memory that they are written from."""
        return self.stays and self.made_for is not None and self.made_for.trainer.sleep_weights != "disk"

    @property
    def keeps_on_device(self) -> bool:
        return self.keeps and self.made_for is not None and self.made_for.trainer.sleep_weights == "gpu"

    def take(self, job: TrainJob) -> Kept | None:
        """Take the cached state that a job starts from, if there is one. The cache is emptied in any case: the job will change the state."""
        kept, self.kept = self.kept if self.holds(job) else None, None
        return kept

    def attach(self, job: TrainJob, a: Architecture) -> list[Shard]:
        """Attach the adapter's layers, for a job that has taken its starting state. Their values are undefined.

        Everything else that they depend on is equal for all jobs of one session: see stage_of.
        """
        assert self.net is not None and self.place is not None and self.kept is None
        # Perf: layers that stay attached: 0.049 -> 0.004 s a job (7B, H200, docs/results/h200-hand-over.md).
        if self.attached is None or self.attached.lora != job.trainer.lora:
            self._detach()
            t = job.trainer
            shards = lora.attach(self.net, a, t.lora, self.place, sequence_parallel=t.sequence_parallel)
            self.attached = Attached(t.lora, shards)
        return self.attached.shards

    def forget(self) -> None:
        self.kept = None
        self._detach()

    def host_state_of(self, job: TrainJob, shards: list[Shard], place: ParallelContext) -> HostState:
        """Return the host memory from which a job's state is written: the last job's memory, if it fits."""
        engine_dtype = model.base_dtype(job.trainer, place.device)
        if self.host_state and self.host_state.fits(shards, engine_dtype):
            return self.host_state
        if self.host_state:
            self.host_state.memory.free()
        locks = self.keeps and place.device.type == "cuda"
        made = HostState(shards, place, engine_dtype=engine_dtype, keeps=self.keeps and not self.keeps_on_device, locks=locks)
        self.host_state = made if self.keeps else None
        return made

    def values_to_keep(self, shards: list[Shard], adam: torch.optim.AdamW, on_host: HostState) -> Values | None:
        """Return the values of a saved step that are to be cached."""
        if not self.keeps:
            return None
        return adapter_state.values_of(shards, adam) if self.keeps_on_device else on_host.mine(shards)

    def keep(self, job: TrainJob, values: Values | None, written: dict[str, Digest], num_optimizer_steps: int) -> None:
        """Cache the state at the end of a job whose files are complete. written: Digests of the files that rank 0 wrote. Collective."""
        if values is None:
            return
        said = parallel.told_by_first({name: digest.sha256 for name, digest in written.items()})
        self.kept = Kept(adapter_state.written_by(job, said, num_optimizer_steps), values, is_on_device=self.keeps_on_device)

    def release_device(self) -> None:
        """Free the device before the end of a job that has all it needs on the host. Only in a persistent trainer. Collective."""
        if not self.stays:
            return
        if self.keeps_on_device and self.attached:
            for shard in self.attached.shards:
                shard.parameter.grad = None
        else:
            self._detach()
        self.sleep()

    def teardown(self) -> None:
        """Tear down after a job on whose outcome all ranks agree. After any other error a rank could wait for its peers forever."""
        if not self.stays:
            parallel.stop()
        elif self.kept is None:  # then the adapter's layers hold nothing useful
            self._detach()

    def _detach(self) -> None:
        if self.net is not None and self.attached is not None:
            lora.detach(self.net)
            self.attached = None

    def end(self) -> None:
        """Leave the process groups for good."""
        if self.place is not None:
            parallel.stop()

    def sleep(self) -> Asleep:
        """Free device memory, if that has not been done yet. Collective."""
        if self.asleep is None:
            begin = time.perf_counter()
            held_bytes = self._give_back()
            self.asleep = Asleep(held_bytes, time.perf_counter() - begin)
        return self.asleep

    def _give_back(self) -> int:
        if self.experts:
            self.experts.release()
        if self.net is None or self.place is None or self.place.device.type == "cpu":
            return 0
        torch.cuda.synchronize()
        if self.copy:
            self.copy.take()
            self.copy.drop()
        # Sequence parallelism gathers into a buffer that megatron-core would keep.
        parallel_state.get_global_memory_buffer().buffer.clear()
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.tensor(torch.cuda.memory_reserved(), device=self.place.device)
        dist.all_reduce(held)
        return int(held)

    def _wake(self, a: Architecture) -> None:
        assert self.net is not None and self.place is not None and self.made_for is not None
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self.copy and not self.copy.give_back():
            base_weights.load_base(self.net, self.made_for.model_path, a, self.place)
