"""The section `reward`: which function scores the samples."""

from infra.config.tools.base import ConfigBase


class RewardConfig(ConfigBase):
    """Which function scores the samples."""

    name: str = "gsm8k_numeric"
    """A built-in reward, a function in a file (`mine.py:score`, from where the command runs), or a dotted path (`my_module.my_reward`). A built-in
    one needs answers that are a number, or end in `#### 42`: rows whose own answer would not score 1 are refused before the run."""
    shuffle_seed: int | None = None
    """A control, not for use: the rewards of each step change places among its samples, so that they say nothing about them."""
