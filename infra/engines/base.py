"""The engine border: five verbs, and what every engine's answer must satisfy before anyone else sees it."""

import math
from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from infra.config import HandOver, SamplingConfig
from infra.prompts import Prompt
from infra.records import AdapterVersion
from infra.samples import Sample

MAX_LOGPROB_ROUNDING = 1e-4
"""Nats by which a log-probability may exceed 0: float32 noise of a softmax, no more."""


class EngineUnavailable(RuntimeError):
    """The engine does not answer (any more): it may be started again."""


class EngineRefused(RuntimeError):
    """The engine says that a request is wrong; asking again will not help."""


class WrongAnswer(RuntimeError):
    """The engine answered, and the answer cannot be right: nothing made from it may be used."""


class Release(BaseModel):
    """What a release of memory came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: HandOver
    reason: str
    """Why this plan, for people."""
    released_bytes: int
    """By the driver's word; 0 where there was nothing to release."""


class RolloutMeasures(BaseModel):
    """How a rollout went; none of it decides what was sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float
    """Mean time from a request to its first token."""
    prefix_cache_hit_frac: float
    """Prompt tokens that were in the prefix cache, of all prompt tokens of the samples."""


class Engine(Protocol):
    def wake(self) -> None:
        """Launch, adopt or resume the engine, then the golden check. Costs next to nothing when it is awake.

        Raises:
            EngineUnavailable: if it cannot be started.
            WrongAnswer: if the base model does not answer as it did before.
        """

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Serve this adapter and no other, then the canary. Version 0 is the base model.

        Raises:
            WrongAnswer: if the engine's log-probabilities with this adapter are not the trainer's.
        """

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, adapter: AdapterVersion
    ) -> tuple[list[Sample], RolloutMeasures]:
        """group_size checked samples of each prompt, by prompt and sample index, from the adapter that was loaded."""

    def release_memory(self) -> Release:
        """Make room for the trainer, and wait for the driver's word that the room is there."""

    def stop(self) -> None:
        """End the engine and everything that it started."""


def check_samples(
    samples: Sequence[Sample], prompts: Sequence[Prompt], group_size: int, adapter: AdapterVersion, vocab_size: int
) -> None:
    """Raises WrongAnswer unless every prompt has its samples, each by this adapter, with tokens and log-probabilities that can be."""
    expected = [(prompt.prompt_id, index) for prompt in prompts for index in range(group_size)]
    if [(sample.prompt_id, sample.sample_index) for sample in samples] != expected:
        raise WrongAnswer(
            f"engine returned {len(samples)} samples, {len(expected)} were asked for ({len(prompts)} prompts x {group_size})"
        )
    for sample in samples:
        if problem := _problem(sample, adapter, vocab_size):
            raise WrongAnswer(f"sample {sample.sample_index} of prompt {sample.prompt_id}: {problem}")


def _problem(sample: Sample, adapter: AdapterVersion, vocab_size: int) -> str | None:
    if (sample.adapter_version, sample.adapter_sha256) != (adapter.version, adapter.sha256):
        return f"sampled by adapter {sample.adapter_version} ({sample.adapter_sha256}), asked for {adapter.version} ({adapter.sha256})"
    if not sample.output_tokens:
        return f"no output tokens (finish reason {sample.finish_reason!r})"
    if len(sample.output_tokens) != len(sample.output_logprobs):
        return f"{len(sample.output_tokens)} tokens with {len(sample.output_logprobs)} log-probabilities"
    outside = [token for token in sample.output_tokens if not 0 <= token < vocab_size]
    if outside:
        return f"token {outside[0]} is outside the vocabulary of {vocab_size}"
    impossible = [value for value in sample.output_logprobs if not math.isfinite(value) or value > MAX_LOGPROB_ROUNDING]
    if impossible:
        return f"log-probability {impossible[0]} cannot be"
    if sample.finish_reason not in ("stop", "length"):
        return f"finish reason {sample.finish_reason!r}"
    return None
