"""The section `reward.model`: a model with a head that gives a number, for the reward `reward_model`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config.tools.base import ConfigBase

HOW_REWARD_MODELS_RUN = {"device", "load_timeout_s"}
"""Fields of the section that do not decide what a sample gets, but for rounding."""


class RewardModelConfig(ConfigBase):
    """The model that scores samples for the reward `reward_model`: a Hugging Face model for sequence classification, in a program of its
    own. It reads the model into host memory beside the rollout, and is on a GPU only while samples are scored."""

    path: str = ""
    """Folder of the model, or its hub id, such as Skywork/Skywork-Reward-V2-Qwen3-0.6B. It needs safetensors and a chat template."""
    revision: str = ""
    """Commit, branch or tag of a hub id. Empty: the main branch."""
    label: int = Field(default=0, ge=0)
    """Number of the model's output that is the reward, from 0. A model with one output has only 0. The reward is the output as it is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes. auto: on the trainer's first GPU, or on the CPU without one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision. auto: bfloat16 on a GPU, float32 on a CPU."""
    max_tokens: int = Field(default=4096, ge=1)
    """Longest conversation, in tokens of the reward model; a sample with a longer one is unjudged. At most the model's positions."""
    max_tokens_per_batch: int = Field(default=16384, ge=1)
    """Most tokens of a batch, padding included: lower it if its GPU's memory is short. Not below max_tokens."""
    load_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time in which its program starts and reads the weights, in seconds."""

    @model_validator(mode="after")
    def _longest_fits_a_batch(self) -> Self:
        if self.max_tokens > self.max_tokens_per_batch:
            raise ValueError(
                f"reward.model.max_tokens {self.max_tokens} is above max_tokens_per_batch {self.max_tokens_per_batch}: a conversation is never cut"
            )
        return self

    @model_validator(mode="after")
    def _revision_is_of_a_hub_id(self) -> Self:
        if self.revision and not self.path:
            raise ValueError(f"reward.model.revision {self.revision!r} without path: set the hub id of which it is")
        return self
