"""From prompts to a batch: what is asked, how answers are sampled, what they are worth."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config.tools.base import Section

FILE_KINDS = (".jsonl", ".json", ".parquet")
"""Of local data files."""


class DataConfig(Section):
    """Where prompts come from."""

    source: str = "arithmetic"
    """`arithmetic` (generated word problems), a Hugging Face hub id (`openai/gsm8k`), or a local JSONL or Parquet file or folder."""
    subset: str | None = None
    """The hub data set's configuration, such as `main` for GSM8K."""
    split: str = "train"
    """Split on the hub, or files of a folder (train.jsonl). A single file has none: a part of it is held out for evaluations by itself."""
    held_out_seed: int = 0
    """Seed of the hash that chooses the held-out rows of a single file: min(evaluation.num_prompts, a quarter of the rows), never trained on.
    Rows of equal text stay together. None are held out where evaluation.every is 0 or evaluation.source is another data set."""
    question_column: str = "question"
    """Column of the questions, each one text; lists of chat messages are refused."""
    answer_column: str = "answer"
    """Column of the answers: text, or an integer, a float or a bool, which the reward gets as JSON writes it (42, 0.5, true)."""
    instruction: str = ""
    """Put behind each question, after one blank."""
    num_prompts: int = Field(default=16, ge=1)
    """Prompts (= groups) per step."""
    num_spare_prompts: int = Field(default=0, ge=0)
    """Prompts drawn besides. A rollout ends when num_prompts whole groups are there, whichever; the rest is broken off and not used.
    Shortens the wait for the longest answers, at a price: groups with long answers are left out more often."""
    partial_rollouts: bool = False
    """What is broken off is used: the next step begins with those groups, goes on with their answers, and does not end without them. So no
    group is left out, and no token is more than one RL step old; needs a kind of trainer.loss.correction, since those tokens are another
    adapter's. Source: Kimi k1.5, arXiv 2501.12599, section 2.6."""
    allow_repeats: bool = False
    """Let a step hold the same row several times, for data sets of fewer rows than a step has prompts, and the same text in more than half of
    its prompts. False: both are errors. Several passes over the data are always possible."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt of more than max_prompt_tokens: stop, or leave it out of the data set."""

    @property
    def is_single_file(self) -> bool:
        """By its name alone, so that an old configuration means the same after its file was moved."""
        return Path(self.source).suffix in FILE_KINDS


class DataPart(DataConfig):
    """A data set and which of its rows are meant, as RunConfig.training and Exam.data say it."""

    part: Literal["all", "training", "held_out"] = "all"
    num_held_out: int = 0
    """Rows to hold out, a quarter of the file at most."""


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
    """A built-in reward, or the dotted path of a function (`my_package.my_module.my_reward`). A built-in one needs answers that are a number, or
    end in `#### 42`: rows whose own answer would not score 1 are refused before the run."""
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
    """Leave groups whose rewards are all equal out of the batch. As DAPO's dynamic sampling, but no other prompts are sampled in their
    place: the batch gets smaller, unless data.num_prompts draws more prompts than max_groups needs."""
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
