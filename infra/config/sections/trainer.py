"""The section `trainer` of a configuration: LoRA, loss, optimizer, layout, mode. Part of infra.config, which hands it on."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config.tools.base import ConfigBase

DEFAULT_MICROBATCH_TOKENS = 16384
"""What max_tokens_per_microbatch None stands for on a CPU, and where a colocation plan is chosen."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class LoraConfig(ConfigBase):
    """The adapter that is trained."""

    rank: int = Field(default=8, ge=1)
    """Rank of the adapter's matrices; engine.max_lora_rank or less."""
    alpha: float = Field(default=16, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ALL_LINEAR
    """Layers with an adapter: any of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    start_from: str | None = None
    """Folder of a PEFT LoRA adapter from which the run starts, such as one of supervised fine-tuning; it becomes adapter version 0. Its rank,
    alpha and targets must be those of this section. None: a new adapter that changes nothing at first."""

    @field_validator("target_modules")
    @classmethod
    def _known_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(targets) - set(ALL_LINEAR))
        if unknown or not targets:
            raise ValueError(f"target_modules {unknown or '()'} cannot be adapted; choose from {', '.join(ALL_LINEAR)}")
        return tuple(name for name in ALL_LINEAR if name in targets)


class KlConfig(ConfigBase):
    """A penalty for leaving the base model; it costs one forward pass with the adapters off."""

    coefficient: float = Field(default=0.0, ge=0)
    """0: no penalty and no pass."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(policy || base). k1 in the loss has no gradient on average: it belongs in the reward."""
    where: Literal["loss", "reward"] = "loss"
    """reward: each sample's reward falls by coefficient x its sum over tokens, before advantages are computed."""


class CorrectionConfig(ConfigBase):
    """What is done about the engine's log-probabilities not being quite the trainer's."""

    mode: Literal["bypass", "decoupled"] = "bypass"
    """bypass: ratios are against the engine's log-probabilities; decoupled: against the trainer's own before its first
    optimizer step, and `kind` corrects for what lies between the two."""
    kind: Literal["none", "tis", "mis", "icepop"] = "none"
    """With w = trainer's old / engine's probability. tis: min(w, cap); mis: w, or 0 above cap; icepop: w, or 0 outside [floor, cap]."""
    level: Literal["token", "sequence"] = "token"
    """w of each token, or the product over its sequence."""
    cap: float = Field(default=2.0, gt=0)
    """Upper bound of w."""
    floor: float = Field(default=0.5, gt=0)
    """Lower bound of w, below cap; used by icepop only."""
    max_staleness: int = Field(default=0, ge=0, le=16)
    """RL steps by which the adapter that sampled is older than the one that is trained; a run's first steps have it less. n: the prompts of
    the next n steps are answered while this step trains; engine and trainer need GPUs of their own then (colocation plan separate_gpus),
    and a kind that corrects. Range [0, 16]."""
    in_flight_updates: bool = False
    """A rollout that is under way goes on with the next adapter as soon as that is committed, max_staleness of 1 or more: unfinished answers
    are aborted and continue from their tokens so far. With engine.deterministic the first half of sampling.max_output_tokens of each answer is
    the older adapter's, whenever the next one comes (docs/colocation.md)."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.kind != "none" and self.mode == "bypass":
            raise ValueError(
                f"correction kind {self.kind!r} with mode 'bypass' would count the mismatch twice, the ratio holds it already: "
                "set mode to 'decoupled'"
            )
        if self.max_staleness and self.kind == "none":
            raise ValueError(
                f"correction max_staleness {self.max_staleness} with kind 'none': samples of an older adapter need a correction, "
                "set mode to 'decoupled' and kind to 'tis', 'mis' or 'icepop'"
            )
        if self.in_flight_updates and not self.max_staleness:
            raise ValueError(
                "correction in_flight_updates true with max_staleness 0: no rollout is under way when a new adapter comes, set max_staleness to 1 "
                "or more"
            )
        if self.kind == "icepop" and self.floor >= self.cap:
            raise ValueError(f"correction floor {self.floor} must be below cap {self.cap}")
        return self


class LossConfig(ConfigBase):
    """What the trainer minimises; formulas and sources in docs/objectives.md."""

    kind: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: clipped token ratios; gspo: clipped sequence ratios; cispo: clipped ratios as weights, gradient in all tokens."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]; 1 is no lower bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper bound of the ratio, above 1; higher than clip_low leaves room for tokens that are rare so far (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the ratio where the advantage is negative (ppo only; 3 is usual); None: no bound."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "episode_mean_token_mean"] = "token_mean"
    """Mean over the loss tokens of the whole mini-batch; or over sequences of each sequence's token mean; or over sequences
    of each sequence's token sum / loss_scale_factor; or over episodes of each episode's token mean, all its branches together. A sequence is a
    whole trajectory, all turns of one branch."""
    loss_scale_factor: int | None = Field(default=None, ge=1)
    """Of seq_mean_token_sum_norm, which needs it; Dr.GRPO: sampling.max_output_tokens."""
    kl: KlConfig = KlConfig()
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Times the entropy, averaged with the weights of the aggregation, taken off the loss."""
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


class TrainerConfig(ConfigBase):
    """The Megatron LoRA trainer: one optimizer step for each mini-batch of an RL step."""

    lora: LoraConfig = LoraConfig()
    loss: LossConfig = LossConfig()
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per RL step: the batch is cut between groups into num_minibatches parts (fewer where it has fewer groups)."""
    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    """Learning rate of AdamW after the warm-up; for LoRA 1e-5 to 1e-3 is usual. Range (0, 1]."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or along a cosine to min_lr_ratio x learning_rate at optimizer step num_schedule_steps."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises in a straight line; the last of them has all of it."""
    num_schedule_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole cosine, warm-up included."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the cosine, as a share of learning_rate."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's mean of squared gradients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW, times the learning rate at each optimizer step."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""
    max_mismatch: float | None = Field(default=0.5, gt=0)
    """Nats. A step is refused whose samples have other log-probabilities in the trainer than in the engine, by more than this on average:
    another model has sampled them. Rounding comes to 0.1 at most (bfloat16, random weights); at low temperatures to that divided by it.
    None: no step is refused."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass; bounds the memory of activations. The longest sequence has to fit. What the samples of
    a group have in common counts once. None: as many as the GPU has room for, by the peaks that earlier steps measured; 16384 on a CPU."""
    num_processes: int = Field(default=1, ge=1)
    """torchrun ranks on all nodes together = data parallel x tensor parallel."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks over which each layer is split; divides num_processes."""
    sequence_parallel: bool = False
    """Split activations outside the split layers along the sequence too; needs tensor_parallel of 2 or more."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks over which the experts of a mixture-of-experts model are spread; divides num_processes."""
    first_gpu: int = Field(default=0, ge=0)
    """Place of the trainer's first GPU among those that the run may use. Above 0, with engine.colocation `separate_gpus`, those before it are
    the engine's alone; not used with RATCHET_TRAINER_GPUS."""
    routing_replay: bool = False
    """Send each token of a mixture of experts to the experts to which the engine sent it, instead of those that the trainer's own router
    would choose (R3, arXiv 2510.11370); their shares stay the trainer's. SGLang only, one prompt and one answer. What it costs: docs/trainer.md."""
    share_experts: bool = False
    """Compute with the engine's copy of a mixture's experts instead of a second one, so that none of them move between engine and trainer. One
    GPU, SGLang, plan keep_weights, persistent trainer; the result is the same (docs/colocation.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the frozen base; adapters are always float32. auto: float32 on a CPU, bfloat16 on a GPU."""
    recompute: bool = False
    """Recompute activations in the backward pass: slower, less memory."""
    timeout_s: float = Field(default=3600, gt=0)
    """Longest training of one RL step."""
    mode: Literal["auto", "per_step", "persistent"] = "auto"
    """per_step: a fresh program for each step; persistent: one that stays up between steps, off the GPU. The result is the same. auto:
    persistent, but per_step where the GPU has no room for a sleeping trainer beside the engine, and over several nodes."""
    sleep_weights: Literal["auto", "host", "gpu", "disk"] = "auto"
    """Where a persistent trainer has the frozen weights between steps. auto: gpu where the engine leaves room for them, else host (see
    infra.colocation.plans); host: page-locked, if it has room for half as much again; disk: read again at each wake, as it is where the
    host has no room."""

    @property
    def microbatch_tokens(self) -> int:
        """max_tokens_per_microbatch, or what None stands for where nothing is known of the machine."""
        return self.max_tokens_per_microbatch or DEFAULT_MICROBATCH_TOKENS

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.lr_scheduler_type == "cosine" and (self.num_schedule_steps or 0) <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_scheduler_type 'cosine' with num_schedule_steps {self.num_schedule_steps} and lr_warmup_steps {self.lr_warmup_steps}: "
                "num_schedule_steps must be given and above lr_warmup_steps"
            )
        if self.lr_scheduler_type == "constant" and (self.num_schedule_steps is not None or self.min_lr_ratio):
            raise ValueError(
                f"lr_scheduler_type 'constant' with num_schedule_steps {self.num_schedule_steps} and min_lr_ratio {self.min_lr_ratio:g}: the rate "
                "would not fall, set lr_scheduler_type to 'cosine', or leave both out"
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
