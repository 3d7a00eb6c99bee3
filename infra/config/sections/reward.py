"""The section `reward`: which function scores the samples."""

import re

from pydantic import Field, field_validator

from infra.config.tools.base import ConfigBase

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOW_REWARDS_RUN = {"timeout_s", "workers", "memory_mib", "environment", "concurrency", "max_unjudged_frac"}
"""Fields that do not decide what a sample gets."""


class RewardConfig(ConfigBase):
    """Which function scores the samples."""

    name: str = "gsm8k_numeric"
    """A built-in reward, a function in a file (`mine.py:score`, from where the command runs), or a dotted path (`my_module.my_reward`). A built-in
    one needs answers that are a number, or end in `#### 42`: rows whose own answer would not score 1 are refused before the run."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one sample, in seconds; for one call of a function that takes a batch. A sample that takes longer is tried once more, then
    it is unjudged. Built-in rewards run in the flow's process and need none of this and the next five fields."""
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

    @property
    def judged_by(self) -> str:
        """Return what decides the outcome of a sample, apart from the reward's source, as JSON."""
        return self.model_dump_json(include={"name"})
