"""What a comparison of engines is: options with the names and defaults of the published suite, and what follows from them."""

import hashlib
import shlex
from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from infra.config import ColocationChoice, EngineConfig, SamplingConfig, TrainerConfig
from infra.config.tools.base import ConfigBase
from infra.machine import devices

Backend = Literal["vllm", "sglang"]
KNOWN: tuple[Backend, ...] = ("vllm", "sglang")
NOT_DECIDING = {"output", "skip_preflight", "name", "start_timeout_s", "request_timeout_s"}
"""Options that change no figure: changing one keeps the steps that were made."""
CPU_KV_SLACK = 2
WARM_UP_TOKENS = 16


class ComparisonConfig(ConfigBase):
    """Engines, load and rules of one comparison."""

    mode: Literal["inference", "training"] = "inference"
    """inference: training is replaced by holding the memory that it would hold, for as long; training: the real Megatron step."""
    model: str = "Qwen/Qwen2.5-7B-Instruct"
    """As RunConfig.model."""
    backends: tuple[Backend, ...] = KNOWN
    """Engines to measure, in the order of the first round; one alone is measured without a comparison."""
    num_steps: int = Field(default=3, ge=1)
    """RL steps of each engine in each round."""
    num_rollouts: int = Field(default=16, ge=1)
    """Samples of a step."""
    concurrency: int = Field(default=8, ge=1)
    """Requests under way at a time."""
    max_input_tokens: int = Field(default=1024, ge=8)
    """Length of every prompt of the speed part."""
    max_output_tokens: int = Field(default=1024, ge=2)
    """Length of every answer of the speed part; the most in the quality part."""
    output: str = "benchmark_results"
    """Folder of the report, the figures, the charts and the server logs."""
    sglang_python: str = "auto"
    """Interpreter of SGLang's environment; auto: RATCHET_SGLANG_PYTHON, else .venv-sglang."""
    vllm_python: str = "auto"
    """Interpreter of vLLM's environment; auto: RATCHET_VLLM_PYTHON, else .venv-vllm."""
    vllm_port: int = Field(default=8100, ge=1, le=65535)
    """Port of vLLM's server."""
    sglang_port: int = Field(default=8200, ge=1, le=65535)
    """Port of SGLang's server."""
    tp: int = Field(default=0, ge=0)
    """Tensor parallel size of the engines; 0: auto, all GPUs of this machine."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """vLLM's --gpu-memory-utilization and SGLang's --mem-fraction-static; they do not mean quite the same, KV pool tokens tell."""
    skip_preflight: bool = False
    """Start without looking for what cannot work."""
    colocation: ColocationChoice = "auto"
    """As engine.colocation of a run."""
    lora_mode: Literal["adapter"] = "adapter"
    """adapter: the engine serves base model and adapter, which is loaded at run time."""
    sglang_flags: str = ""
    """More of SGLang's own flags, as one would write them in a shell: what a machine needs, such as --attention-backend fa3."""
    vllm_flags: str = ""
    """More of vLLM's."""
    rounds: int = Field(default=2, ge=1)
    """Starts of each engine, every second round in the opposite order: what drifts with time shows."""
    group_size: int = Field(default=1, ge=1)
    """Samples of one prompt; above 1 a prompt goes once first and its samples find it in the prefix cache."""
    num_quality: int = Field(default=8, ge=0)
    """Arithmetic questions that are answered with free length at the end of each round; 0: none."""
    train_s: float = Field(default=0.0, ge=0)
    """How long memory is held in mode inference; 0: auto, by the arithmetic of the step at 40% of the GPU's peak."""
    train_gib: float = Field(default=0.0, ge=0)
    """How much memory is held in mode inference; 0: auto, weights, adapter with its optimizer, activations."""
    seed: int = 0
    """Of prompts, adapters and sampling."""
    name: str = "comparison"
    """Names the MLflow runs."""
    start_timeout_s: float = Field(default=900, gt=0)
    """Longest start of an engine's server."""
    request_timeout_s: float = Field(default=600, gt=0)
    """Longest silence from an engine; as engine.request_timeout_s of a run."""
    trainer: TrainerConfig = TrainerConfig()

    @field_validator("backends", mode="before")
    @classmethod
    def _one_word_or_several(cls, backends: object) -> object:
        words = [backends] if isinstance(backends, str) else backends
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return backends
        return tuple(name for word in words for name in word.split())

    @field_validator("backends")
    @classmethod
    def _each_once(cls, backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
        if not backends or len(set(backends)) < len(backends):
            raise ValueError(f"backends {' '.join(backends)!r} must name one or more of {', '.join(KNOWN)}, each once")
        return backends

    @model_validator(mode="after")
    def _trainer_stands_alone(self) -> Self:
        if self.trainer.share_experts:
            raise ValueError(
                "trainer.share_experts true in a comparison of engines is not supported: its trainer has experts of its own, set it to false"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        if self.num_rollouts % self.group_size:
            raise ValueError(f"num_rollouts {self.num_rollouts} is no multiple of group_size {self.group_size}")
        longest = self.max_input_tokens + self.max_output_tokens
        if longest > self.trainer.microbatch_tokens and self.mode == "training":
            raise ValueError(
                f"max_input_tokens + max_output_tokens = {longest} is more than trainer.max_tokens_per_microbatch "
                f"{self.trainer.microbatch_tokens}"
            )
        return self

    @property
    def num_prompts(self) -> int:
        return self.num_rollouts // self.group_size

    @property
    def speed(self) -> SamplingConfig:
        """Lengths are fixed: an engine is no faster for stopping early, and no slower for going on."""
        return SamplingConfig(group_size=self.group_size, max_output_tokens=self.max_output_tokens, ignore_eos=True)

    @property
    def quality(self) -> SamplingConfig:
        return SamplingConfig(group_size=1, max_output_tokens=self.max_output_tokens)

    @property
    def warm_up(self) -> SamplingConfig:
        return SamplingConfig(group_size=1, max_output_tokens=min(WARM_UP_TOKENS, self.max_output_tokens), ignore_eos=True)

    def engine(self, backend: Backend) -> EngineConfig:
        """The same for all, but for what has another name elsewhere."""
        context = self.max_input_tokens + self.max_output_tokens
        return EngineConfig(
            kind=backend,
            max_context_tokens=context,
            max_running_requests=self.concurrency,
            max_lora_rank=self.trainer.lora.rank,
            tensor_parallel=self.tp or max(devices.num_gpus(), 1),
            memory_fraction=self.gpu_memory_utilization,
            kv_cache_tokens=max(1024, CPU_KV_SLACK * self.concurrency * context),
            colocation=self.colocation,
            deterministic=False,  # it costs speed, and lengths are fixed
            start_timeout_s=self.start_timeout_s,
            request_timeout_s=self.request_timeout_s,
            extra_flags=self.flags(backend),
        )

    def flags(self, backend: Backend) -> tuple[str, ...]:
        """Those that an engine gets besides what all runs give it."""
        if backend == "vllm":
            return tuple(shlex.split(self.vllm_flags))
        # Else each chunk of a stream repeats all before it, and SGLang would be measured writing them.
        return ("--incremental-streaming-output", *shlex.split(self.sglang_flags))

    def port(self, backend: Backend) -> int:
        return self.vllm_port if backend == "vllm" else self.sglang_port

    def python(self, backend: Backend) -> str:
        return self.vllm_python if backend == "vllm" else self.sglang_python


class Block(NamedTuple):
    """The steps of one engine in one round, made without another engine between them."""

    round: int
    backend: Backend

    @property
    def name(self) -> str:
        return f"{self.round:02d}-{self.backend}"


def blocks_of(config: ComparisonConfig) -> Iterator[Block]:
    """A B, B A, A B, ..."""
    for number in range(config.rounds):
        for backend in config.backends if number % 2 == 0 else reversed(config.backends):
            yield Block(number, backend)


def digest_of(config: ComparisonConfig, base_sha256: str) -> str:
    """Of all that decides the figures: steps made with it are steps of this comparison."""
    content = config.model_dump_json(exclude=NOT_DECIDING)
    return hashlib.sha256(f"{content} {base_sha256}".encode()).hexdigest()[:12]
