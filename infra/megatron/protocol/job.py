"""The trainer program's interface: one JSON in, one JSON out. No torch here: both sides import this file.

    job.json --> torchrun -m infra.megatron job.json --> output_dir/{adapter_config.json, adapter_model.safetensors, and in state/
                                                          exp_avg.safetensors, exp_avg_sq.safetensors, canary.json}; result_path last

The state has a folder of its own because SGLang reads every *.safetensors in the adapter's folder as adapter weights. An adapter on the experts
of a mixture is written a second time, into engine/: with each layer's experts stacked, which an engine reads in a fraction of the time.

batch.safetensors (numpy or torch; T tokens in all, S sequences; sequence s is [cu_seqlens[s], cu_seqlens[s+1])):

    tokens            int64 [T]    prompt and output of each sequence, one after the other; a sequence of several turns has given tokens
                                   (tool results, user turns) between sampled ones
    cu_seqlens        int64 [S+1]
    loss_mask         uint8 [T]    1 at sampled tokens that count in the loss
    rollout_logprobs  float32 [T]  nats, of the behavior policy; 0 at tokens that were not sampled
    advantages        float32 [T]  the sequence's or the turn's advantage at sampled tokens; 0 elsewhere
    groups            int64 [S]    which sequences are samples of one prompt (optional: then each is a group of its own)
    episodes          int64 [S]    which sequences are branches of one episode (optional: then each is an episode of its own)
    rewards           float32 [S]  from which the advantages were computed (optional, unless the loss has a KL penalty in the reward)
    routes            uint8 or int16 [T, layers, K]  with trainer.routing_replay: experts to which the engine sent each token of a mixture; 0 at the
                                   last token of each sequence, which it did not read
    metadata: adapter_version, adapter_sha256, temperature, advantage (how advantages were computed; optional, like rewards)
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from infra.config import TrainerConfig
from infra.store.digests import Digest

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CANARY = "state/canary.json"
ENGINE_WEIGHTS = "engine/adapter_model.safetensors"
ENGINE_CONFIG = "engine/adapter_config.json"
MEETING_FILE = "RATCHET_MEETING_FILE"
"""Environment variable: the file through which the ranks of one node find each other."""


class TrainJob(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: Path
    """Hugging Face folder of the base model."""
    base_model_id: str
    """Written into adapter_config.json as base_model_name_or_path: a hub id, or the digest of a local model folder."""
    base_sha256: str = ""
    """Digest of the base model's files: a persistent trainer reloads the model when it changes. Empty: unknown, only the path is compared."""
    adapter_path: Path | None
    """Folder of the adapter to start from; None starts from the base model."""
    adapter_version: int
    """RL steps that the adapter has been trained for."""
    adapter_sha256: str
    """Digest of its adapter_model.safetensors; `base` for version 0."""
    moments_sha256: dict[str, str] = {}
    """Digests of its exp_avg and exp_avg_sq files: a persistent trainer that has cached this state does not read it. Empty: it reads the files."""
    sampler_version: int | None = None
    sampler_sha256: str | None = None
    """Digest of the adapter that sampled the batch; None: the same adapter. It may be older by up to trainer.loss.correction.max_staleness."""
    num_optimizer_steps: int
    """Optimizer steps taken up to that adapter: more than its version where a step has several mini-batches."""
    batch_path: Path
    output_dir: Path
    """Must exist and be empty. Receives adapter version adapter_version + 1."""
    result_path: Path
    seed: int
    """Seed of the initial LoRA A matrices."""
    num_threads: int
    """CPU threads of each rank."""
    device: Literal["cpu", "cuda"]
    shared_experts: Path | None = None
    """With trainer.share_experts: the file that names the engine's experts (infra.megatron.protocol.shared_experts). None: the engine has ended,
    they are read from the model's files."""
    switches: dict[str, str] = {}
    """Environment variables of libraries by which the trainer may compute something else; see infra.processes.child_environment."""
    trainer: TrainerConfig


class TrainResult(BaseModel):
    """The file that rank 0 writes last. Its presence means that every other file is complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    adapter_version: int
    """Version of the new adapter."""
    num_optimizer_steps: int
    """Optimizer steps taken up to the new adapter."""
    metrics: dict[str, float]
    """train/loss, train/grad_norm, train/clip_frac, train/entropy, train/tokens_per_s, train/mfu (on a known GPU),
    mismatch/...; see infra.megatron.loss.metrics."""
    seconds: dict[str, float]
    """Seconds by phase: import, build, load (or wake, in a persistent trainer), adapter, train, export."""
    began_at: dict[str, float] = {}
    """When each of these phases started, in seconds since the epoch."""
    files: dict[str, Digest] = {}
    """Digests of the large files, by path in output_dir, computed while they were written."""
    peak_memory_gib: float
    """Peak memory, the largest over ranks: of the GPU, or of the process on a CPU."""
    microbatch_rows: int = 0
    """Rows of rank 0's largest micro-batch, which decide the peak."""
    microbatch_logits: int = 0
    """Loss tokens of that micro-batch."""
    versions: dict[str, str]
    """Versions of imported packages and CUDA, and on a GPU of GPU and driver; see infra.machine.read_versions. The job's switches."""
    backends: dict[str, str] = {}
    """Backends of attention, LoRA and the fused operations."""


class Canary(BaseModel):
    """A fixed text with the trainer's log-probs; an engine that serves the adapter must give the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[int]
    base_logprobs: list[float]
    """Log-probs of tokens[1:], each given the tokens before it, in nats, at temperature 1, adapters off."""
    adapter_logprobs: list[float]
    """The same with the adapter on."""


def stage_of(job: TrainJob) -> dict[str, str]:
    """Return the fields that must be equal for two jobs to run in one program: model and process groups depend on them."""
    job = TrainJob.model_validate_json(job.model_dump_json())  # as in its file: a default of 3600 comes back as 3600.0
    own = ("model_path", "base_sha256", "device", "num_threads")
    layout = ("num_processes", "tensor_parallel", "sequence_parallel", "expert_parallel")
    others = ("dtype", "recompute", "sleep_weights", "share_experts", "timeout_s")
    asked = {name: getattr(job, name) for name in own} | {name: getattr(job.trainer, name) for name in (*layout, *others)}
    return {name: str(value) for name, value in asked.items()}
