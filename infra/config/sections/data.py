"""The section `data`: where prompts come from, and which rows of a data set are meant."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from infra.config.tools.base import ConfigBase

FILE_KINDS = (".jsonl", ".json", ".parquet")
"""Of local data files."""


class DataConfig(ConfigBase):
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
    num_oversampled_prompts: int = Field(default=0, ge=0)
    """Prompts drawn besides. A rollout ends when num_prompts whole groups are there, whichever; the rest is aborted and not used.
    Shortens the wait for the longest answers, at a price: groups with long answers are left out more often."""
    partial_rollouts: bool = False
    """What is aborted is used: the next step begins with those groups, goes on with their answers, and does not end without them. So no
    group is left out, and no token is more than one RL step old; needs a kind of trainer.loss.correction, since those tokens are another
    adapter's. Source: Kimi k1.5, arXiv 2501.12599, section 2.6."""
    allow_repeats: bool = False
    """Let a step hold the same row several times, for data sets of fewer rows than a step has prompts, and the same text in more than half of
    its prompts. False: both are errors. Several passes over the data are always possible."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt, chat template included; long_prompts says what becomes of longer ones."""
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt of more than max_prompt_tokens: stop, or leave it out of the data set."""

    @property
    def is_single_file(self) -> bool:
        """By its name alone, so that an old configuration means the same after its file was moved."""
        return Path(self.source).suffix in FILE_KINDS


class DataPart(DataConfig):
    """A data set and which of its rows are meant, as used by RunConfig.training and EvalConfig.data."""

    part: Literal["all", "training", "held_out"] = "all"
    num_held_out: int = 0
    """Rows to hold out, a quarter of the file at most."""
