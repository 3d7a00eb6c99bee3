"""The samples of a rollout of episodes: which episodes are asked for, and what becomes of each that is finished."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.environments.carried import NOTHING, CarriedEpisodes
from infra.environments.groups import WholeGroups
from infra.environments.journal import FinishedEpisode, Key
from infra.environments.parts import STOP, TURN
from infra.failures import RewardFailed
from infra.models import base_model
from infra.records import AdapterVersion
from infra.store.samples import Sample, sample_of

log = logging.getLogger(__name__)

FAILED, UNKNOWN = "environment failed", "outcome unknown"
"""Reasons of an episode that could not be judged. The second: a tool was called, and whether it had its effect is not known."""
NUM_SHOWN = 3


class EpisodeRequest(NamedTuple):
    """The episodes of a rollout."""

    environment: PlayedEnvironment
    source: str
    """Digest of the environment's source."""
    sampling: SamplingConfig
    engine: EngineConfig
    adapter: AdapterVersion
    prompts: Sequence[Prompt]
    num_oversampled: int = 0
    """Groups more than are needed: the rollout ends when the others are complete."""
    carries_over: bool = False
    """The next step goes on with the episodes of the others."""
    carried: CarriedEpisodes = NOTHING
    """What the step before carried over."""
    must_be_whole: frozenset[int] = frozenset()
    """Prompts of the groups that it carried over."""
    of: str = ""
    """What they are episodes of: the run, or one of its evaluations. No two have a call of a tool with the same key."""

    @property
    def keys(self) -> list[tuple[Prompt, int]]:
        return [(prompt, index) for prompt in self.prompts for index in range(self.sampling.group_size)]

    def whole_groups(self, finished: Iterable[Key]) -> WholeGroups:
        """finished: Episodes that have finished, in the order in which they did."""
        prompt_ids = [prompt.prompt_id for prompt in self.prompts]
        num = len(prompt_ids) - self.num_oversampled
        return WholeGroups(prompt_ids, self.sampling.group_size, num, finished, self.must_be_whole)


def samples_of(request: EpisodeRequest, episodes: dict[Key, FinishedEpisode], *, stops: bool = True) -> list[Sample]:
    """Return the samples of all episodes of the needed groups, by prompt, sample index and branch, with their rewards.

    stops: Whether more failed episodes than environment.max_failed_frac allows are an error.

    Raises:
        RewardFailed: for too many failed episodes; one line with the first of them.
    """
    samples: list[Sample] = []
    failed: list[str] = []
    whole = set(request.whole_groups(episodes).prompt_ids)
    asked = [(prompt, index) for prompt, index in request.keys if prompt.prompt_id in whole]
    for prompt, index in asked:
        episode = episodes[prompt.prompt_id, index]
        if episode.outcome.reward is None:
            failed.append(f"{episode.outcome.message}, for question {prompt.question!r:.200}")
        samples += _samples_of(prompt, index, episode, request.adapter)
    if stops and len(failed) > request.environment.max_failed_frac * len(asked):
        raise RewardFailed(
            f"environment {request.environment.label!r} failed in {len(failed)} of {len(asked)} episodes, and reward.max_unjudged_frac is "
            f"{request.environment.max_failed_frac:g}: {'; '.join(failed[:NUM_SHOWN])}"
        )
    if failed:
        log.warning("%d of %d episodes failed and are left out: %s", len(failed), len(asked), "; ".join(failed[:NUM_SHOWN]))
    folder = base_model.locate(request.adapter.base.id)
    texts = base_model.texts_of(folder, [sample.output_tokens for sample in samples])
    return [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)]


def _samples_of(prompt: Prompt, index: int, episode: FinishedEpisode, adapter: AdapterVersion) -> list[Sample]:
    reward, parts = episode.outcome.reward, episode.outcome.parts or {}
    if reward is None:
        # What it sampled is not trained on, and its row says that it failed.
        about = (adapter.version, adapter.sha256)
        empty = Sample(prompt.prompt_id, index, prompt.prompt_tokens, [], [], "error", *about)
        whole = [_of_rollout(sample_of(each, prompt.prompt_id, index), adapter) for each in episode.trajectories] or [empty]
        reason = UNKNOWN if episode.outcome.reason == UNKNOWN else FAILED
        return [replace(each, unjudged=reason, stop_reason="failed") for each in whole]
    of_turns = tuple(parts[f"{TURN}{number}"] for number in range(len(parts)) if f"{TURN}{number}" in parts)
    others = {name: value for name, value in parts.items() if name != STOP and not name.startswith(TURN)}
    found = [_of_rollout(sample_of(each, prompt.prompt_id, index), adapter) for each in episode.trajectories]
    has_turns = len(of_turns) == sum(each.num_turns for each in found)
    return [
        replace(
            each,
            reward=reward,
            reward_parts=others or {"reward": reward},
            turn_rewards=of_turns[each.first_turn :][: each.num_turns] if has_turns else None,
        )
        for each in found
    ]


def _of_rollout(sample: Sample, adapter: AdapterVersion) -> Sample:
    """Count the tokens that the step before has sampled. The segments name the adapter of each turn."""
    by = (adapter.version, adapter.sha256)
    older = [span for span in sample.segments if span.is_sampled and (span.adapter_version, span.adapter_sha256) != by]
    if not older:
        return sample
    return replace(
        sample,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        num_older_tokens=sum(span.num_tokens for span in older),
        older_adapter_sha256=older[-1].adapter_sha256,
    )
