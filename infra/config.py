"""What an experiment is. A RunConfig is a flow parameter, a form in the Prefect UI and a file beside the results.

What this machine is (paths, ports, GPUs, secrets) is `infra.settings`; the two never mix. Each section goes whole to the tasks
that use it and is part of their cache key, so a value belongs to the section whose results it changes.
"""

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

HandOver = Literal["resident", "offload", "restart"]


class Section(BaseModel):
    # The sentence under a field is its help text: in the Prefect UI's form and wherever else the schema is shown.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def but(self, **changes: object) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate(dict(self) | changes)


class DataConfig(Section):
    """Where prompts come from."""

    source: str = "arithmetic"
    """`arithmetic` (generated word problems), a Hugging Face hub id (`openai/gsm8k`), or a local JSONL or Parquet file or folder."""
    subset: str | None = None
    """The hub data set's configuration, such as `main` for GSM8K."""
    split: str = "train"
    question_column: str = "question"
    answer_column: str = "answer"
    instruction: str = ""
    """Put behind each question, after one blank."""
    num_prompts: int = Field(default=16, ge=1)
    """Prompts (= groups) per step."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt of more than max_prompt_tokens: stop, or leave it out of the data set."""


class EngineConfig(Section):
    """The rollout engine."""

    kind: Literal["sglang", "scripted"] = "sglang"
    """`scripted` is the shipped fake, for tests and drills."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    max_context_tokens: int = Field(default=512, ge=16)
    """Prompt and output together."""
    max_running_requests: int = Field(default=64, ge=1)
    max_lora_rank: int = Field(default=16, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    memory_fraction: float = Field(default=0.8, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache; not used on a CPU."""
    kv_cache_tokens: int = Field(default=65536, ge=1024)
    """Size of the KV cache on a CPU, where it has to be bounded; not used on a GPU."""
    hand_over: Literal["auto"] | HandOver = "auto"
    """How the engine makes room for the trainer; auto: chosen by `infra.devices` with its reason shown."""
    deterministic: bool = True
    """Equal seeds give equal samples, whatever else is in the batch; costs speed on a GPU. Without it SGLang ignores seeds."""
    start_timeout_s: float = Field(default=600, gt=0)
    request_timeout_s: float = Field(default=600, gt=0)
    """Longest silence from the engine, and longest time for one sample."""
    extra_flags: tuple[str, ...] = ()
    """Given to the engine's command line last, such as `("--schedule-policy", "lpm")`."""


class SamplingConfig(Section):
    """How completions are sampled. Nucleus and top-k sampling are left out on purpose: they would sample from another
    distribution than the one whose log-probabilities the trainer can compute."""

    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt."""
    temperature: float = Field(default=1.0, gt=0)
    max_output_tokens: int = Field(default=64, ge=1)


class RewardConfig(Section):
    name: str = "gsm8k_numeric"
    """A built-in reward, or the dotted path of a function (`my_package.my_module.my_reward`)."""


class BatchConfig(Section):
    """From rewards to a batch that the trainer can use."""

    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """grpo: (reward - mean) / (std + 1e-6) of its group; dr_grpo: reward - mean."""
    mask_truncated: bool = False
    """Leave samples that ran into max_output_tokens out of the loss (their rewards still count in the group's mean)."""


class LoraConfig(Section):
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16, gt=0)
    target_modules: tuple[str, ...] = ALL_LINEAR

    @field_validator("target_modules")
    @classmethod
    def _known_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(targets) - set(ALL_LINEAR))
        if unknown or not targets:
            raise ValueError(f"target_modules {unknown or '()'} cannot be adapted; choose from {', '.join(ALL_LINEAR)}")
        return tuple(name for name in ALL_LINEAR if name in targets)


class TrainerConfig(Section):
    """The Megatron LoRA trainer: one optimizer step per RL step."""

    lora: LoraConfig = LoraConfig()
    learning_rate: float = Field(default=2e-4, gt=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.28, gt=0)
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the loss tokens of the whole batch, or over sequences of each sequence's token mean."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    num_processes: int = Field(default=1, ge=1)
    """torchrun ranks on this machine = data parallel x tensor parallel."""
    tensor_parallel: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    expert_parallel: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the frozen base; adapters are always float32. auto: float32 on a CPU, bfloat16 on a GPU."""
    recompute: bool = False
    """Recompute activations in the backward pass: slower, less memory."""
    timeout_s: float = Field(default=3600, gt=0)
    life: Literal["per_step", "resident"] = "per_step"
    """per_step: a fresh program for each step; resident: one that stays up between steps, off the GPU. The result is the same."""
    idle_weights: Literal["host", "gpu"] = "host"
    """Where a resident trainer keeps the frozen weights between steps; gpu only where the engine leaves room for them."""

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        for name in ("tensor_parallel", "expert_parallel"):
            size = getattr(self, name)
            if self.num_processes % size:
                raise ValueError(f"num_processes {self.num_processes} is no multiple of {name} {size}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel of 2 or more")
        return self


class TrackingConfig(Section):
    experiment: str = "ratchet"
    """MLflow experiment."""
    num_samples_shown: int = Field(default=8, ge=0)
    """Samples in the table artifact of each step."""


class RunConfig(Section):
    """One training run."""

    name: str = "run"
    """Names the run's folder and its MLflow run."""
    model: str = "tiny"
    """`tiny` or `tiny-moe` (made here when missing), a Hugging Face folder, or a hub id."""
    seed: int = 0
    data: DataConfig = DataConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    trainer: TrainerConfig = TrainerConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name):
            raise ValueError(
                f"run name {name!r} must be 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit"
            )
        return name

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.sampling.group_size < 2:
            raise ValueError(
                f"sampling.group_size {self.sampling.group_size} with advantage {self.batch.advantage!r}: a group needs 2 samples "
                "or more, one alone has nothing to be compared with"
            )
        longest = self.data.max_prompt_tokens + self.sampling.max_output_tokens
        if longest > self.engine.max_context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + sampling.max_output_tokens "
                f"{self.sampling.max_output_tokens} = {longest} is more than engine.max_context_tokens {self.engine.max_context_tokens}"
            )
        if longest > self.trainer.max_tokens_per_microbatch:
            raise ValueError(
                f"a sequence may have {longest} tokens (data.max_prompt_tokens + sampling.max_output_tokens), more than "
                f"trainer.max_tokens_per_microbatch {self.trainer.max_tokens_per_microbatch}"
            )
        if self.trainer.lora.rank > self.engine.max_lora_rank:
            raise ValueError(
                f"trainer.lora.rank {self.trainer.lora.rank} is above the engine's maximum, engine.max_lora_rank {self.engine.max_lora_rank}"
            )
        return self
