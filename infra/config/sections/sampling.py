"""The section `sampling`: how completions are sampled."""

from pydantic import Field

from infra.config.tools.base import ConfigBase


class SamplingConfig(ConfigBase):
    """How completions are sampled. Nucleus and top-k sampling are left out on purpose: they would sample from another
    distribution than the one whose log-probabilities the trainer can compute."""

    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; 1: the model's own distribution, lower: likelier tokens."""
    max_output_tokens: int = Field(default=64, ge=1)
    """Longest answer; a longer one is cut off there."""
    ignore_eos: bool = False
    """Sample up to max_output_tokens even after an end-of-sequence token: for measuring an engine's speed, not for training."""

    @property
    def nucleus(self) -> float:
        """Probability mass of the likeliest tokens that are sampled from."""
        return 1.0
