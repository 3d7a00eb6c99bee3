"""Partial rollouts: the next rollout resumes the samples that one rollout aborts. Kimi k1.5, arXiv 2501.12599, section 2.6; slime's
`--partial-rollout` does the same.

Without them, a rollout that ends when enough groups are complete would silently drop groups with long answers in every step.
Carried-over groups must be complete in the next rollout. So no group is dropped, and no token is older than one step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from infra.records import AdapterVersion
from infra.store.samples import Sample

T = TypeVar("T")
Key = tuple[int, int]
"""Prompt id and sample index."""


@dataclass
class Partial:
    """The groups carried over into a rollout, and those that it carries over to the next."""

    stop_token_ids: frozenset[int]
    """Tokens that end an answer."""
    max_output_tokens: int
    begun: Mapping[Key, Sample] = field(default_factory=dict)
    """Samples of the carried-over groups from the previous step: finished ones and, with finish_reason `abort`, prefixes."""
    prompt_ids: frozenset[int] = frozenset()
    """Prompts of those groups."""
    left: dict[Key, Sample] = field(default_factory=dict)
    """Samples of the groups that this rollout has aborted."""

    def __post_init__(self) -> None:
        self.begun = {key: _in_lists(sample) for key, sample in self.begun.items()}  # lists, as from an engine

    def finished(self, adapter: AdapterVersion) -> dict[Key, Sample]:
        """Return the samples that need no more tokens, as samples of a rollout by this adapter."""
        return {key: of_rollout(sample, adapter) for key, sample in self.begun.items() if sample.finish_reason != "abort"}

    def prefixes(self) -> dict[Key, Sample]:
        return {key: sample for key, sample in self.begun.items() if sample.finish_reason == "abort"}

    def leave(self, sample: Sample) -> None:
        """Carry a sample over to the next step.

        An answer aborted in the moment in which it ends is reported as aborted, with its end in it. SGLang samples one more token first:
        `to_finish` in its managers/schedule_batch.py. Such an answer is finished. It must not be continued, and its last token must not be
        sampled again: either would bias how often answers end.
        """
        if sample.finish_reason == "abort":
            sample = self._ended(sample)
        if sample.output_tokens:
            self.left[sample.prompt_id, sample.sample_index] = sample

    def _ended(self, sample: Sample) -> Sample:
        tokens = list(sample.output_tokens)
        end = next((n for n, token in enumerate(tokens, start=1) if token in self.stop_token_ids), None)
        if end is not None and end <= self.max_output_tokens:
            return replace(sample, output_tokens=tokens[:end], output_logprobs=sample.output_logprobs[:end], finish_reason="stop")
        num = self.max_output_tokens
        if len(tokens) >= num:
            return replace(
                sample, output_tokens=tokens[:num], output_logprobs=sample.output_logprobs[:num], finish_reason="length"
            )
        return sample


def by_key(samples: Iterable[Sample]) -> dict[Key, Sample]:
    return {(sample.prompt_id, sample.sample_index): sample for sample in samples}


def _in_lists(sample: Sample) -> Sample:
    def plain(values: Sequence[T] | NDArray[Any]) -> list[T]:
        return values.tolist() if isinstance(values, np.ndarray) else list(values)

    return replace(
        sample,
        prompt_tokens=plain(sample.prompt_tokens),
        output_tokens=plain(sample.output_tokens),
        output_logprobs=plain(sample.output_logprobs),
    )


def of_rollout(sample: Sample, adapter: AdapterVersion) -> Sample:
    """Convert a carried-over sample, all of whose tokens are older."""
    return replace(
        sample,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        num_older_tokens=len(sample.output_tokens),
        older_adapter_sha256=sample.adapter_sha256,
    )
