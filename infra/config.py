"""What an experiment is. A RunConfig is a flow parameter, a form in the Prefect UI and a file beside the results.

What this machine is (paths, ports, GPUs, secrets) is `infra.settings`; the two never mix. Each section goes whole to the tasks
that use it and is part of their cache key, so a value belongs to the section whose results it changes.
"""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.engine_config import EngineConfig as EngineConfig
from infra.engine_config import HandOver as HandOver
from infra.section import Section as Section
from infra.trainer_config import ALL_LINEAR as ALL_LINEAR
from infra.trainer_config import ATTENTION as ATTENTION
from infra.trainer_config import CorrectionConfig as CorrectionConfig
from infra.trainer_config import KlConfig as KlConfig
from infra.trainer_config import LoraConfig as LoraConfig
from infra.trainer_config import LossConfig as LossConfig
from infra.trainer_config import TrainerConfig as TrainerConfig

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


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
    num_spare_prompts: int = Field(default=0, ge=0)
    """Prompts drawn besides. A rollout ends when num_prompts whole groups are there, whichever; the rest is broken off and not used.
    Shortens the wait for the longest answers, at a price: groups with long answers are left out more often."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt of more than max_prompt_tokens: stop, or leave it out of the data set."""


def checked_name(name: str, what: str) -> str:
    """Raises ValueError for a name that cannot be that of a folder and part of a URL."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must be 1 to 80 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return name


class SamplingConfig(Section):
    """How completions are sampled. Nucleus and top-k sampling are left out on purpose: they would sample from another
    distribution than the one whose log-probabilities the trainer can compute."""

    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt."""
    temperature: float = Field(default=1.0, gt=0)
    max_output_tokens: int = Field(default=64, ge=1)
    ignore_eos: bool = False
    """Go on to max_output_tokens whatever is sampled: for measuring an engine's speed, not for training."""


class RewardConfig(Section):
    name: str = "gsm8k_numeric"
    """A built-in reward, or the dotted path of a function (`my_package.my_module.my_reward`)."""
    shuffle_seed: int | None = None
    """A control, not for use: the rewards of each step change places among its samples, so that they say nothing about them."""


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
    """Leave groups whose rewards are all equal out of the batch (DAPO's dynamic sampling)."""
    max_groups: int | None = Field(default=None, ge=1)
    """With drop_flat_groups: of the groups that are left the first so many make the batch, the others are left out too. With
    data.num_prompts above it the batch is full although some groups are flat; None: all."""

    @model_validator(mode="after")
    def _only_dropping_needs_a_maximum(self) -> Self:
        if self.max_groups is not None and not self.drop_flat_groups:
            raise ValueError(
                f"max_groups {self.max_groups} without drop_flat_groups: draw fewer prompts (data.num_prompts) instead"
            )
        return self


class ExamSamplingConfig(SamplingConfig):
    """Sampling of an evaluation, which may also take the likeliest token each time."""

    temperature: float = Field(default=0.0, ge=0)
    """0: the likeliest token."""


class Exam(Section):
    """An evaluation with every value resolved: equal exams give figures that can be compared."""

    data: DataConfig
    """num_prompts of it are asked: the same ones, whatever the run."""
    reward: RewardConfig
    pass_reward: float
    max_output_tokens: int
    num_samples: int
    temperature: float
    pass_at_k: tuple[int, ...]

    @property
    def greedy(self) -> ExamSamplingConfig:
        return ExamSamplingConfig(group_size=1, max_output_tokens=self.max_output_tokens)

    @property
    def sampled(self) -> ExamSamplingConfig | None:
        """None where only greedy answers are asked for."""
        if not self.num_samples:
            return None
        return ExamSamplingConfig(
            group_size=self.num_samples, temperature=self.temperature, max_output_tokens=self.max_output_tokens
        )


class EvaluationConfig(Section):
    """How good the adapter is on questions that are not trained on, and what follows from it."""

    every: int = Field(default=5, ge=0)
    """Steps between two evaluations of a run; besides, one before training and one at the end. 0: none at all."""
    source: str | None = None
    """As data.source; None: data.source itself."""
    subset: str | None = None
    """As data.subset; where source is None, data.subset is taken."""
    split: str = "test"
    num_prompts: int = Field(default=64, ge=1)
    """Held-out questions, the same ones each time; all of them where there are fewer."""
    num_samples: int = Field(default=0, ge=0)
    """Sampled answers to each question, for pass@k; 0: only the greedy one, for pass@1."""
    pass_at_k: tuple[int, ...] = ()
    """Each k of pass@k, none above num_samples."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampled answers."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """None: sampling.max_output_tokens."""
    pass_reward: float = 1.0
    """An answer with this reward or more passes."""
    patience: int | None = Field(default=None, ge=1)
    """The run ends when so many evaluations, one after the other, were not better than the best before them; None: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """Better means better by more than this, in pass@1."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        wrong = [k for k in self.pass_at_k if not 1 <= k <= self.num_samples]
        if wrong:
            raise ValueError(
                f"evaluation.pass_at_k {wrong[0]} needs as many samples or more of each question: evaluation.num_samples is {self.num_samples}"
            )
        if self.num_samples and not self.pass_at_k:
            raise ValueError(
                f"evaluation.num_samples {self.num_samples} without pass_at_k: name a k, such as (1, {self.num_samples}), or leave it 0"
            )
        if self.patience is not None and not self.every:
            raise ValueError(f"evaluation.patience {self.patience} needs evaluations: set evaluation.every to 1 or more")
        return self


class RetentionConfig(Section):
    """Which adapter versions stay on the disk. The latest one always does, with its optimizer state: the next step needs both."""

    keep_last: int | None = Field(default=None, ge=1)
    """The latest so many versions stay whole; None: all do, and nothing is ever removed."""
    keep_every: int = Field(default=0, ge=0)
    """Each version that is a multiple of this stays whole too; 0: none."""
    keep_best: bool = True
    """The version with the best evaluation stays whole too."""
    of_others: Literal["adapter", "nothing"] = "adapter"
    """What stays of all other versions. adapter: without optimizer state, it can be served but not trained on."""


class ExportConfig(Section):
    """What a run leaves in its folder `export` when it ends."""

    what: Literal["nothing", "adapter", "merged"] = "adapter"
    """adapter: a PEFT folder; merged: besides, a Hugging Face folder of the base model with the adapter in its weights."""
    which: Literal["best", "latest"] = "best"
    """best: by pass@1; without evaluations the latest."""


class TrackingConfig(Section):
    experiment: str = "ratchet"
    """MLflow experiment; also names a folder of artifacts."""
    sweep: str = ""
    """Name that the runs of a sweep share; a tag in MLflow. Empty: the run belongs to none."""
    num_samples_shown: int = Field(default=8, ge=0)
    """Samples in the table artifact of each step."""

    @field_validator("experiment")
    @classmethod
    def _experiment_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "experiment")


class RunConfig(Section):
    """One training run."""

    name: str = "run"
    """Names the run's folder and its MLflow run."""
    model: str = "tiny"
    """`tiny`, `tiny-moe` or, on a GPU, `small` (made here when missing), a Hugging Face folder, or a hub id."""
    seed: int = 0
    num_steps: int = Field(default=20, ge=1)
    """RL steps of the whole run; a run that has fewer goes on up to here."""
    data: DataConfig = DataConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    retention: RetentionConfig = RetentionConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def exam(self) -> Exam:
        """What an evaluation of this run measures; when it does, and what follows, is no part of it."""
        asked = self.evaluation
        elsewhere = {"source": asked.source, "subset": asked.subset} if asked.source else {}
        return Exam(
            data=self.data.but(split=asked.split, num_prompts=asked.num_prompts, num_spare_prompts=0, **elsewhere),
            reward=self.reward.but(shuffle_seed=None),
            pass_reward=asked.pass_reward,
            max_output_tokens=asked.max_output_tokens or self.sampling.max_output_tokens,
            num_samples=asked.num_samples,
            temperature=asked.temperature,
            pass_at_k=tuple(sorted(set(asked.pass_at_k))),
        )

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        return checked_name(name, "run name")

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_groups()
        if self.data.num_spare_prompts and self.engine.deterministic:
            raise ValueError(
                f"data.num_spare_prompts {self.data.num_spare_prompts} with engine.deterministic: which groups are whole first is a matter "
                "of timing, so no rollout of it can be made again; set engine.deterministic to false (a replay takes the samples over)"
            )
        retention = self.retention
        if self.trainer.loss.correction.max_age and retention.keep_last == 1 and retention.of_others == "nothing":
            raise ValueError(
                "retention.keep_last 1 with of_others 'nothing' removes the adapter that trainer.loss.correction.max_age 1 still samples from: "
                "keep 2, or of_others 'adapter'"
            )
        longest = self.data.max_prompt_tokens + self.sampling.max_output_tokens
        if longest > self.engine.max_context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + sampling.max_output_tokens "
                f"{self.sampling.max_output_tokens} = {longest} is more than engine.max_context_tokens {self.engine.max_context_tokens}"
            )
        asked = self.data.max_prompt_tokens + (self.evaluation.max_output_tokens or 0)
        if asked > self.engine.max_context_tokens:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + evaluation.max_output_tokens "
                f"{self.evaluation.max_output_tokens} = {asked} is more than engine.max_context_tokens {self.engine.max_context_tokens}"
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
        if batch.max_groups is not None and batch.max_groups > self.data.num_prompts:
            raise ValueError(
                f"batch.max_groups {batch.max_groups} is above data.num_prompts {self.data.num_prompts}: draw as many or more"
            )
        if self.trainer.num_minibatches > self.data.num_prompts:
            raise ValueError(
                f"trainer.num_minibatches {self.trainer.num_minibatches} is above the number of groups, data.num_prompts {self.data.num_prompts}"
            )
        if batch.max_groups is not None and self.trainer.num_minibatches > batch.max_groups:
            raise ValueError(
                f"trainer.num_minibatches {self.trainer.num_minibatches} is above batch.max_groups {batch.max_groups}"
            )
        longest = batch.overlong.max_output_tokens
        if longest is not None and longest > self.sampling.max_output_tokens:
            raise ValueError(
                f"batch.overlong.max_output_tokens {longest} is above sampling.max_output_tokens {self.sampling.max_output_tokens}: "
                "no sample is that long"
            )
