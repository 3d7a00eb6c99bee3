"""The section `reward`: which function scores the samples."""

import re
from typing import Annotated

from pydantic import Field, WithJsonSchema, field_validator

from infra.config.tools.base import ConfigBase

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOW_REWARDS_RUN = {"timeout_s", "workers", "memory_mib", "environment", "concurrency", "max_unjudged_frac"}
"""Fields that do not decide what a sample gets."""


class RewardFunction(ConfigBase):
    """One of several rewards."""

    name: str
    """As reward.name."""
    weight: float = 1.0
    """What its reward is multiplied by before the sum."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the parts of a dict that it returns, by name; 1 where a part has none."""

    @property
    def label(self) -> str:
        """The function's name, without file or module."""
        return re.split(r"[:.]", self.name)[-1]


OneOfSeveral = Annotated[
    RewardFunction,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "weight": {"type": "number"},
                "weights": {"type": "object", "additionalProperties": {"type": "number"}},
            },
            "required": ["name"],
        }
    ),
]
"""With a schema that stands by itself: the form has no definitions."""


class RewardConfig(ConfigBase):
    """Which function scores the samples."""

    name: str = "gsm8k_numeric"
    """A built-in reward, a function in a file (`mine.py:score`, from where the command runs), or a dotted path (`my_module.my_reward`). Rows by
    which a built-in one cannot judge are refused before the run: those for GSM8K need answers that are a number, or end in `#### 42`."""
    functions: tuple[OneOfSeveral, ...] = ()
    """Several rewards, in place of name: a list such as [{"name": "gsm8k_numeric"}, {"name": "mine.py:short", "weight": 0.2}]. The reward is the
    sum of theirs times their weights, and each is a part. A sample that one of them cannot judge is unjudged. "weights" are those of the parts
    of a dict that the function returns."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one sample, in seconds; for one call of a function that takes a batch. A sample that takes longer is tried once more, then
    it is unjudged. The built-in rewards for GSM8K run in the flow's process and need none of this and the next four fields."""
    workers: int | None = Field(default=None, ge=1)
    """Processes that call the reward. None: one for each core, 16 at most."""
    memory_mib: int = Field(default=4096, ge=128)
    """Memory that a worker may use, in MiB; more is a MemoryError in the reward."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the reward needs; it gets no others but PATH, HOME, locale, PYTHONPATH and the like. Values stay in
    the environment."""
    concurrency: int = Field(default=16, ge=1)
    """Calls of an async reward that are under way at once."""
    max_unjudged_frac: float = Field(default=0.05, ge=0, le=1)
    """Largest share of a step's samples that may be unjudged: above it the step stops and names them. An evaluation above it is not used to
    choose or to compare. Range 0 to 1."""
    shuffle_seed: int | None = None
    """A control, not for use: the rewards of each step change places among its samples, so that they say nothing about them."""

    @field_validator("environment")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if any(not VARIABLE.fullmatch(name) for name in names):
            raise ValueError(
                "reward.environment holds something that is no variable's name: give names alone, such as MY_KEY, never values"
            )
        return names

    @field_validator("functions")
    @classmethod
    def _have_labels(cls, functions: tuple[RewardFunction, ...]) -> tuple[RewardFunction, ...]:
        labels = [function.label for function in functions]
        if double := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(
                f"reward.functions has two functions of the name {double[0]!r}, which is that of their part: rename one"
            )
        return functions

    @property
    def called(self) -> tuple[RewardFunction, ...]:
        """The functions that are called: reward.functions, or the one of reward.name."""
        return self.functions or (RewardFunction(name=self.name),)

    @property
    def title(self) -> str:
        return ", ".join(function.name for function in self.called)
