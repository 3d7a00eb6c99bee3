"""The section `batch`: from rewards to a batch that the trainer can use."""

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config.tools.base import ConfigBase


class OverlongConfig(ConfigBase):
    """DAPO's soft penalty: a reward falls in a straight line over the last buffer_tokens before max_output_tokens."""

    buffer_tokens: int = Field(default=0, ge=0)
    """0: no penalty."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Where the penalty is whole; sampling.max_output_tokens or less. Of an episode all sampled tokens count, so that this is up to
    environment.max_turns times as much."""
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


class BatchConfig(ConfigBase):
    """From rewards to a batch that the trainer can use."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """grpo: (reward - mean) / (std + 1e-6) of its group; dr_grpo: reward - mean; rloo: reward - mean of the group's others;
    reinforce_pp: (reward - mean) / std over the loss tokens of the whole batch."""
    advantage_level: Literal["episode", "turn"] = "episode"
    """episode: all turns of an episode have its advantage. turn: each turn has its own, from the rewards that it and later turns got, compared
    with the same turn of the group's other episodes. Without several turns the two are equal."""
    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """With advantage_level turn: factor by which the reward of each later turn counts less. Range (0, 1]; 1: no discount."""
    mask_truncated: bool = False
    """Leave samples whose last answer ran into max_output_tokens, or whose episode a limit ended, out of the loss (their rewards still count in the
    group's mean)."""
    overlong: OverlongConfig = OverlongConfig()
    drop_zero_std_groups: bool = False
    """Leave groups whose rewards are all equal out of the batch. No other prompts are sampled in their place, as data.max_draws does:
    the batch gets smaller, unless data.num_prompts draws more prompts than max_groups needs."""
    max_groups: int | None = Field(default=None, ge=1)
    """With drop_zero_std_groups: of the groups that are left, the first max_groups make the batch, the others are left out too. With
    data.num_prompts above it the batch is full although some groups are flat; None: all."""

    @model_validator(mode="after")
    def _discount_is_between_turns(self) -> Self:
        if self.turn_discount != 1 and self.advantage_level != "turn":
            raise ValueError(
                f"turn_discount {self.turn_discount:g} with advantage_level {self.advantage_level!r}: an episode's reward is the plain sum of "
                "its turns'; set advantage_level to 'turn' or turn_discount to 1"
            )
        return self

    @model_validator(mode="after")
    def _only_dropping_needs_a_maximum(self) -> Self:
        if self.max_groups is not None and not self.drop_zero_std_groups:
            raise ValueError(
                f"max_groups {self.max_groups} without drop_zero_std_groups: draw fewer prompts (data.num_prompts) instead"
            )
        return self
