"""The section `engine` of a configuration: which engine, its sizes, how it makes room. Part of infra.config, which hands it on."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config.tools import engine_flags
from infra.config.tools.base import ConfigBase

SLOWEST_TOKENS_PER_S = 20.0
"""Of one sample in a full batch: what engine.request_timeout_s has to allow for."""

MAX_REPLICAS = 64

ColocationPlan = Literal["keep_weights", "offload", "reload", "restart", "separate_gpus"]
ColocationChoice = Literal["auto", ColocationPlan]
"""One list, not a union: Prefect's form shows a union of two kinds of text as two fields, of which it can change neither."""
CPU_RUNNING_REQUESTS = 64
MOST_RUNNING_REQUESTS = 512
"""Most samples that an engine on a GPU was measured with at a time, and gets by itself (docs/results/speed.md)."""


class EngineConfig(ConfigBase):
    """The rollout engine."""

    kind: Literal["sglang", "vllm", "scripted"] = "sglang"
    """`vllm` needs a GPU (docs/compare-engines.md); `scripted` is the shipped fake, for tests and drills."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    max_context_tokens: int = Field(default=512, ge=16)
    """Prompt and output together."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Samples that a replica generates at a time; others wait for a place. None: on a GPU as many as its share of a rollout has, as far as the KV
    cache holds them at their longest, 512 at most; 64 on a CPU."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the engine casts the base model's linear layers to 8-bit floats when it starts; adapters and the trainer stay as they are. It samples
    from another model than the one that is trained then, so a run's correction is `tis` where it would be `none`. SGLang only, on GPUs with
    compute capability 8.9 or higher."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8: keys and values as 8-bit floats, twice as many tokens in the same memory; on the same conditions. auto: engine.dtype."""
    lora_mode: Literal["adapter", "merged"] = "adapter"
    """adapter: beside the base model's weights, loaded in milliseconds; merged: written into the weights at each step, so that no request
    pays for LoRA. In bfloat16 merging rounds: mismatch/mean_abs_logprob_diff shows by how much."""
    max_lora_rank: int = Field(default=16, ge=1)
    """Highest trainer.lora.rank that the engine has room for."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs over which a replica of the engine splits the model."""
    replicas: int | None = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Servers of engine.tensor_parallel GPUs each, which share a rollout's prompts. auto, which is kept as None: as many as the engine's GPUs
    carry, one on a CPU (docs/how-to/replicas.md)."""
    memory_fraction: float = Field(default=0.8, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache of one replica; not used on a CPU."""
    kv_cache_tokens: int = Field(default=65536, ge=1024)
    """Size of the KV cache on a CPU, where it has to be bounded; not used on a GPU."""
    colocation: ColocationChoice = "auto"
    """How the engine makes room for the trainer. keep_weights: its KV cache is released; offload: its weights too, with a copy on
    the host; reload: the same without a copy, they are read from disk again; restart: the server ends; separate_gpus: engine and trainer
    have GPUs of their own (RATCHET_ENGINE_GPUS, RATCHET_TRAINER_GPUS); auto: chosen, with its reason shown (docs/colocation.md)."""
    keep_host_copy: bool = True
    """With colocation offload: the engine's copy of its weights on the host stays page-locked while it samples, so that the next release does
    not have to lock that memory again. False: it is freed at each wake."""
    allow_unequal_memory: bool = False
    """Start although the GPUs of a tensor-parallel engine have unequal room: the smallest bounds all of them."""
    deterministic: bool = True
    """Equal seeds give equal samples, in any order of requests and on a fresh engine as on a used one: bit for bit on a CPU
    in float32, as long as prefix cache and prefill hold the rollout's prompts; on a GPU nearly, but not to the last bit
    (docs/results/deterministic.md). Costs speed: kernels that do not depend on the batch, and prompts that begin alike share nothing in
    the prefix cache. Without it SGLang ignores seeds, and each launch begins another random stream. A request of another temperature in
    the same batch would change what is drawn: nothing else may use the engine meanwhile."""
    record_routes: bool = False
    """Return the experts to which each token of a sample was sent. Set by trainer.routing_replay; a value of its own has no effect."""
    share_experts: bool = False
    """Let the trainer compute with its experts. Set by trainer.share_experts; a value of its own has no effect."""
    start_timeout_s: float = Field(default=600, gt=0)
    """Longest start of the engine's server."""
    request_timeout_s: float = Field(default=600, gt=0)
    """Longest silence from the engine, in which no request of a rollout is answered. One sample has to fit, at 20 tokens a second; waiting
    for a place among engine.max_running_requests does not count."""
    extra_flags: tuple[str, ...] = ()
    """Given to the engine's command line last, such as `("--schedule-policy", "lpm")`; recorded with the run. Flags that a field or the
    colocation plan sets are refused (infra/config/tools/engine_flags.py)."""

    @property
    def running_requests(self) -> int:
        """max_running_requests with its value on a CPU; on a GPU the colocation plan has set it."""
        return self.max_running_requests or CPU_RUNNING_REQUESTS

    @property
    def is_fp8(self) -> bool:
        """Whether weights or KV cache are 8-bit floats."""
        return self.quantization == "fp8" or self.kv_cache_dtype == "fp8"

    @field_validator("replicas", mode="before")
    @classmethod
    def _auto_is_open(cls, replicas: object) -> object:
        if isinstance(replicas, str) and not replicas.isdigit() and replicas != "auto":
            raise ValueError(f"give a whole number, 1 to {MAX_REPLICAS}, or auto")
        return None if replicas == "auto" else replicas

    @model_validator(mode="after")
    def _fp8_is_possible(self) -> Self:
        name = "quantization" if self.quantization == "fp8" else "kv_cache_dtype"
        if self.is_fp8 and self.kind == "vllm":
            raise ValueError(f"engine.{name} 'fp8' with engine.kind 'vllm' is not supported: take 'sglang'")
        if self.quantization == "fp8" and self.lora_mode == "merged":
            raise ValueError(
                "engine.quantization 'fp8' with lora_mode 'merged': merged weights are 16-bit floats, set lora_mode to 'adapter'"
            )
        if self.quantization == "fp8" and self.colocation == "reload":
            raise ValueError(
                "engine.quantization 'fp8' with colocation 'reload': SGLang does not cast the weights that it reads again, take 'offload' or 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _flags_are_not_ours(self) -> Self:
        engine_flags.check(self.kind, self.extra_flags)
        return self
