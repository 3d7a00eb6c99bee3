"""Credit: from the rewards of episodes and their turns to the advantage of each sample and each turn.

episode  each sample has the advantage of its reward in its group (infra.data.advantages); all its turns share it, as in tinker-cookbook
         (tinker_cookbook/rl/data_processing.py, compute_advantages and trajectory_to_data at 11885f5)
turn     the return of a turn is its reward plus the discounted rewards of later turns, G_t = r_t + discount G_(t+1), as GiGPO's eq. 5
         (arXiv 2505.10978). It is compared with the returns of the same turn in the group's other episodes, as MT-GRPO does it
         (arXiv 2505.11821). An episode that ended earlier counts with its last turn, so an outcome alone gives what level episode gives.

A reward that is no turn's, such as one for the whole episode or a penalty, belongs to the last turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from statistics import fmean

import numpy as np

from infra.config import BatchConfig
from infra.data import advantages
from infra.data.turns.loss_masks import loss_masks
from infra.store.samples import Sample
from infra.trajectories.spans import turn_of_each


def with_advantages(samples: Sequence[Sample], config: BatchConfig) -> list[Sample]:
    """Return the samples with their advantages. All of them are judged."""
    masks = loss_masks(samples, config)
    if config.advantage_level == "turn" and any(sample.segments for sample in samples):
        return _of_turns(samples, config, masks)
    found = advantages.of_batch(
        config.advantage,
        rewards=[sample.reward for sample in samples if sample.reward is not None],
        groups=[sample.prompt_id for sample in samples],
        num_tokens=[int(mask.sum()) for mask in masks],
        episodes=_episodes(samples),
    )
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, found, strict=True)]


def returns(sample: Sample, discount: float) -> list[float]:
    """Return what each turn of a judged sample and the turns after it got."""
    assert sample.reward is not None
    rewards = list(sample.turn_rewards or [0.0] * sample.num_turns)
    rewards[-1] += sample.reward - fsum(rewards)
    found = [rewards[-1]]
    for reward in reversed(rewards[:-1]):
        found.append(reward + discount * found[-1])
    return found[::-1]


def _of_turns(samples: Sequence[Sample], config: BatchConfig, masks: Sequence[np.ndarray]) -> list[Sample]:
    of_samples = [returns(sample, config.turn_discount) for sample in samples]
    if config.advantage == "reinforce_pp":
        counts = [_tokens_of_turns(sample, mask) for sample, mask in zip(samples, masks, strict=True)]
        flat = iter(advantages.reinforce_pp([g for each in of_samples for g in each], [n for each in counts for n in each]))
        found = [[next(flat) for _ in each] for each in of_samples]
    else:
        groups, episodes = [sample.prompt_id for sample in samples], _episodes(samples)
        by_turn = [
            advantages.of_batch(config.advantage, [each[min(turn, len(each) - 1)] for each in of_samples], groups, [], episodes)
            for turn in range(max(map(len, of_samples)))
        ]
        found = [[by_turn[turn][i] for turn in range(len(each))] for i, each in enumerate(of_samples)]
    pairs = zip(samples, found, strict=True)
    return [replace(sample, advantage=fmean(values), turn_advantages=tuple(values)) for sample, values in pairs]


def _tokens_of_turns(sample: Sample, mask: np.ndarray) -> list[int]:
    """Return the number of loss tokens of each turn."""
    if not sample.segments:
        return [int(mask.sum())]
    turns = turn_of_each(sample.segments)[len(sample.prompt_tokens) :]
    return [int((mask & (turns == turn)).sum()) for turn in range(sample.num_turns)]


def _episodes(samples: Sequence[Sample]) -> list[int] | None:
    """Return the episode of each sample; None if none has several branches."""
    if not any(sample.branch for sample in samples):
        return None
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(sample.episode, len(numbers)) for sample in samples]
