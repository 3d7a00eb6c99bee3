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
    """How the engine makes room for the trainer. resident: its KV cache is released; offload: its weights too, with a copy on
    the host; restart: the server ends; auto: chosen with its reason shown (on a CPU there is nothing to release)."""
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


class OverlongConfig(Section):
    """DAPO's soft penalty: a reward falls in a straight line over the last buffer_tokens before max_output_tokens."""

    buffer_tokens: int = Field(default=0, ge=0)
    """0: no penalty."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Where the penalty is whole; sampling.max_output_tokens or less."""
    penalty: float = Field(default=1.0, gt=0)
    """What a sample of max_output_tokens loses."""

    @model_validator(mode="after")
    def _buffer_has_a_place(self) -> Self:
        if self.buffer_tokens and (self.max_output_tokens is None or self.max_output_tokens < self.buffer_tokens):
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} with max_output_tokens {self.max_output_tokens}: set max_output_tokens, "
                "usually to sampling.max_output_tokens, to buffer_tokens or more"
            )
        return self


class BatchConfig(Section):
    """From rewards to a batch that the trainer can use."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """grpo: (reward - mean) / (std + 1e-6) of its group; dr_grpo: reward - mean; rloo: reward - mean of the group's others;
    reinforce_pp: (reward - mean) / std over the loss tokens of the whole batch."""
    mask_truncated: bool = False
    """Leave samples that ran into max_output_tokens out of the loss (their rewards still count in the group's mean)."""
    overlong: OverlongConfig = OverlongConfig()
    drop_flat_groups: bool = False
    """Leave groups whose rewards are all equal out of the batch (DAPO's dynamic sampling, without a refill)."""


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


class KlConfig(Section):
    """A penalty for leaving the base model; it costs one forward pass with the adapters off."""

    coefficient: float = Field(default=0.0, ge=0)
    """0: no penalty and no pass."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(policy || base). k1 in the loss has no gradient on average: it belongs in the reward."""
    where: Literal["loss", "reward"] = "loss"
    """reward: each sample's reward falls by coefficient x its sum over tokens, before advantages are computed."""


class CorrectionConfig(Section):
    """What is done about the engine's log-probabilities not being quite the trainer's."""

    mode: Literal["bypass", "decoupled"] = "bypass"
    """bypass: ratios are against the engine's log-probabilities; decoupled: against the trainer's own before its first
    optimizer step, and `kind` corrects for what lies between the two."""
    kind: Literal["none", "tis", "mis", "icepop"] = "none"
    """With w = trainer's old / engine's probability. tis: min(w, cap); mis: w, or 0 above cap; icepop: w, or 0 outside [floor, cap]."""
    level: Literal["token", "sequence"] = "token"
    """w of each token, or the product over its sequence."""
    cap: float = Field(default=2.0, gt=0)
    floor: float = Field(default=0.5, gt=0)
    """Used by icepop only."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.kind != "none" and self.mode == "bypass":
            raise ValueError(
                f"correction kind {self.kind!r} with mode 'bypass' would count the mismatch twice, the ratio holds it already: "
                "set mode to 'decoupled'"
            )
        if self.kind == "icepop" and self.floor >= self.cap:
            raise ValueError(f"correction floor {self.floor} must be below cap {self.cap}")
        return self


class LossConfig(Section):
    """What the trainer minimises; formulas and sources in docs/objectives.md."""

    kind: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: clipped token ratios; gspo: clipped sequence ratios; cispo: clipped ratios as weights, gradient in all tokens."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]; 1 is no lower bound."""
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the ratio where the advantage is negative (ppo only; 3 is usual); None: no bound."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """Mean over the loss tokens of the whole mini-batch; or over sequences of each sequence's token mean; or over sequences
    of each sequence's token sum / loss_scale_factor."""
    loss_scale_factor: int | None = Field(default=None, ge=1)
    """Of seq_mean_token_sum_norm, which needs it; Dr.GRPO: sampling.max_output_tokens."""
    kl: KlConfig = KlConfig()
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Times the mean entropy, taken off the loss."""
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.dual_clip is not None and self.kind != "ppo":
            raise ValueError(f"dual_clip {self.dual_clip} is for kind 'ppo', not {self.kind!r}: leave it out")
        if (self.aggregation == "seq_mean_token_sum_norm") != (self.loss_scale_factor is not None):
            raise ValueError(
                f"aggregation {self.aggregation!r} with loss_scale_factor {self.loss_scale_factor}: seq_mean_token_sum_norm needs one, "
                "such as sampling.max_output_tokens, and the others take none"
            )
        return self


class TrainerConfig(Section):
    """The Megatron LoRA trainer: one optimizer step for each mini-batch of an RL step."""

    lora: LoraConfig = LoraConfig()
    loss: LossConfig = LossConfig()
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per RL step: the batch is cut between groups into so many parts (fewer where it has fewer groups)."""
    learning_rate: float = Field(default=2e-4, gt=0)
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or along a cosine to min_lr_ratio x learning_rate at optimizer step num_schedule_steps."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises in a straight line; the last of them has all of it."""
    num_schedule_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole cosine, warm-up included."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
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
    def _schedule_fits(self) -> Self:
        if self.lr_scheduler_type == "cosine" and (self.num_schedule_steps or 0) <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_scheduler_type 'cosine' with num_schedule_steps {self.num_schedule_steps} and lr_warmup_steps {self.lr_warmup_steps}: "
                "num_schedule_steps must be given and above lr_warmup_steps"
            )
        return self

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
        self._check_groups()
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

    def _check_groups(self) -> None:
        size, batch = self.sampling.group_size, self.batch
        if size < 2 and batch.advantage != "reinforce_pp":
            raise ValueError(
                f"sampling.group_size {size} with advantage {batch.advantage!r}: a group needs 2 samples "
                "or more, one alone has nothing to be compared with"
            )
        if size < 2 and batch.drop_flat_groups:
            raise ValueError(
                f"sampling.group_size {size} with batch.drop_flat_groups: a group of one is always flat, take 2 or more"
            )
        if self.trainer.num_minibatches > self.data.num_prompts:
            raise ValueError(
                f"trainer.num_minibatches {self.trainer.num_minibatches} is above the number of groups, data.num_prompts {self.data.num_prompts}"
            )
        longest = batch.overlong.max_output_tokens
        if longest is not None and longest > self.sampling.max_output_tokens:
            raise ValueError(
                f"batch.overlong.max_output_tokens {longest} is above sampling.max_output_tokens {self.sampling.max_output_tokens}: "
                "no sample is that long"
            )
