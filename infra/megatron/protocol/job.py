"""The trainer program's interface: one JSON in, one JSON out. No torch in here: both sides import it.

    job.json --> torchrun -m infra.megatron job.json --> output_dir/{adapter_config.json, adapter_model.safetensors, and in state/
                                                          exp_avg.safetensors, exp_avg_sq.safetensors, canary.json}; result_path last

The state has a folder of its own because SGLang takes every *.safetensors of the adapter's folder for adapter weights.

batch.safetensors (numpy or torch; T tokens in all, S sequences; sequence s is [cu_seqlens[s], cu_seqlens[s+1])):

    tokens            int64 [T]    prompt and output of each sequence, one after the other
    cu_seqlens        int64 [S+1]
    loss_mask         uint8 [T]    1 where the token was sampled and counts in the loss
    rollout_logprobs  float32 [T]  nats, of the policy that sampled; 0 outside the outputs
    advantages        float32 [T]  the sequence's advantage at its output tokens; 0 elsewhere
    groups            int64 [S]    which sequences are samples of one prompt (may be missing: each is alone)
    rewards           float32 [S]  from which the advantages were made (may be missing, unless the loss has a KL penalty in the reward)
    metadata: adapter_version, adapter_sha256, temperature, advantage (how they were made; may be missing with rewards)
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from infra.config import TrainerConfig
from infra.store.digests import Digest

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CANARY = "state/canary.json"
MEETING_FILE = "RATCHET_MEETING_FILE"
"""Environment variable: the file by which the ranks of one node find each other."""


class TrainJob(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: Path
    """Hugging Face folder of the base model."""
    base_model_id: str
    """Written into adapter_config.json as base_model_name_or_path: a hub id, or the digest of a model that is a folder."""
    base_sha256: str = ""
    """Of its files: a persistent trainer that has read others reads these again. Empty: it is not known, its place counts alone."""
    adapter_path: Path | None
    """Folder of the adapter to start from; None starts from the base model."""
    adapter_version: int
    """RL steps that adapter has seen."""
    adapter_sha256: str
    """Of its adapter_model.safetensors; `base` for version 0."""
    moments_sha256: dict[str, str] = {}
    """Of the files of its exp_avg and exp_avg_sq: a persistent trainer that has kept this very state does not read it again. Empty: it reads."""
    sampler_version: int | None = None
    sampler_sha256: str | None = None
    """Of the adapter that sampled the batch; None: the same. An older one only as far as trainer.loss.correction.max_staleness allows."""
    num_optimizer_steps: int
    """Taken on the way to that adapter: more than its version where a step has several mini-batches."""
    batch_path: Path
    output_dir: Path
    """Must exist and be empty; receives adapter version adapter_version + 1."""
    result_path: Path
    seed: int
    """Decides the first values of the LoRA A matrices."""
    num_threads: int
    """CPU threads of each rank."""
    device: Literal["cpu", "cuda"]
    trainer: TrainerConfig


class TrainResult(BaseModel):
    """What rank 0 writes last; its presence says that every other file is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    adapter_version: int
    """Of the adapter that was made."""
    num_optimizer_steps: int
    """Taken on the way to it."""
    metrics: dict[str, float]
    """train/loss, train/grad_norm, train/clip_frac, train/entropy, train/tokens_per_s, train/mfu (on a known GPU),
    mismatch/...; see infra.megatron.loss.metrics."""
    seconds: dict[str, float]
    """By phase: import, build, load (or wake, in a persistent trainer), adapter, train, export."""
    began_at: dict[str, float] = {}
    """The same phases' prefixes, in seconds since the epoch."""
    files: dict[str, Digest] = {}
    """Digests of the large ones, by path in output_dir, made while they were written."""
    peak_memory_gib: float
    """Largest over ranks; of the GPU, or of the process where there is none."""
    versions: dict[str, str]
    """Of what the program imported, of CUDA, and on a GPU of GPU and driver; see infra.machine.read_versions."""
    backends: dict[str, str] = {}
    """What computed attention, LoRA and the fused operations."""


class Canary(BaseModel):
    """A fixed text with the trainer's log-probs; an engine that serves the adapter must give the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[int]
    base_logprobs: list[float]
    """Nats, of tokens[1:] given what stands before, temperature 1, adapters off."""
    adapter_logprobs: list[float]
    """The same with the adapter on."""


def stage_of(job: TrainJob) -> dict[str, str]:
    """What must be equal for a job to follow another in one program: the model and the process groups are made from it."""
    job = TrainJob.model_validate_json(job.model_dump_json())  # as its file says it: a default of 3600 comes back as 3600.0
    own = ("model_path", "base_sha256", "device", "num_threads")
    layout = ("num_processes", "tensor_parallel", "sequence_parallel", "expert_parallel")
    others = ("dtype", "recompute", "sleep_weights", "timeout_s")
    asked = {name: getattr(job, name) for name in own} | {name: getattr(job.trainer, name) for name in (*layout, *others)}
    return {name: str(value) for name, value in asked.items()}
