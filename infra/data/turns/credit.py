"""Credit: from the rewards of episodes and their turns to the advantage of each sample and each turn.

episode  each sample has the advantage of its reward in its group (infra.data.advantages); all its turns share it, as in tinker-cookbook
         (tinker_cookbook/rl/data_processing.py, compute_advantages and trajectory_to_data at 11885f5)
turn     the return of a turn is its reward plus the discounted rewards of later turns, G_t = r_t + discount G_(t+1), as GiGPO's eq. 5
         (arXiv 2505.10978). It is compared with the returns of the same turn in the group's other episodes, as MT-GRPO does it
         (arXiv 2505.11821). An episode that ended earlier counts with its last turn, so an outcome alone gives what level episode gives.

A reward that is no turn's, such as one for the whole episode or a penalty, belongs to the last turn. Where each turn is a trajectory of its own
(environment.keep_reasoning false), the turns of an episode are credited as those of one trajectory are.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import fsum
from statistics import fmean

import numpy as np

from infra.config import BatchConfig
from infra.data import advantages
from infra.data.turns.loss_masks import loss_masks
from infra.store.samples import Sample, conversations_of
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


def returns(conversation: Sequence[Sample], discount: float) -> list[float]:
    """Return what each turn and the turns after it got.

    conversation: Judged samples of one reward, whose turns follow one another.
    """
    reward = conversation[0].reward
    assert reward is not None
    rewards = [each for sample in conversation for each in sample.turn_rewards or [0.0] * sample.num_turns]
    rewards[-1] += reward - fsum(rewards)
    found = [rewards[-1]]
    for reward in reversed(rewards[:-1]):
        found.append(reward + discount * found[-1])
    return found[::-1]


def _of_turns(samples: Sequence[Sample], config: BatchConfig, masks: Sequence[np.ndarray]) -> list[Sample]:
    conversations = conversations_of(samples)
    got = [returns([samples[i] for i in each], config.turn_discount) for each in conversations]
    if config.advantage == "reinforce_pp":
        counts = [n for each in conversations for i in each for n in _tokens_of_turns(samples[i], masks[i])]
        flat = iter(advantages.reinforce_pp([g for each in got for g in each], counts))
        found = [[next(flat) for _ in each] for each in got]
    else:
        firsts = [samples[each[0]] for each in conversations]
        groups, episodes = [sample.prompt_id for sample in firsts], _episodes(firsts)
        by_turn = [
            advantages.of_batch(config.advantage, [each[min(turn, len(each) - 1)] for each in got], groups, [], episodes)
            for turn in range(max(map(len, got)))
        ]
        found = [[by_turn[turn][i] for turn in range(len(each))] for i, each in enumerate(got)]
    credited = list(samples)
    for positions, values in zip(conversations, map(iter, found), strict=True):
        for i in positions:
            mine = tuple(islice(values, samples[i].num_turns))
            credited[i] = replace(samples[i], advantage=fmean(mine), turn_advantages=mine)
    return credited


def _tokens_of_turns(sample: Sample, mask: np.ndarray) -> list[int]:
    """Return the number of loss tokens of each turn."""
    if not sample.segments:
        return [int(mask.sum())]
    turns = turn_of_each(sample.segments)[len(sample.prompt_tokens) :]
    return [int((mask & (turns == turn)).sum()) for turn in range(sample.num_turns)]


def _episodes(samples: Sequence[Sample]) -> list[int] | None:
    """Return the episode of each sample; None if none has several trajectories."""
    if not any(sample.branch for sample in samples):
        return None
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(sample.episode, len(numbers)) for sample in samples]
