"""Figures of an evaluation: pass@k, means over questions with confidence intervals, and differences paired by question.

Intervals are mean +- 1.96 standard errors. The standard error is clustered by question: answers to one question are not independent, so a
question counts once, with the mean of its judged answers. Source: Miller 2024, arXiv 2411.00640, sections 2.2 (clusters), 3.1 (several
answers to a question) and 4.2 (paired differences). With few questions, or means near 0 or 1, such an interval is too narrow or leaves [0, 1].
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from infra.eval_records import Interval
from infra.store.samples import WHOLE_REWARD, Sample, episodes_of, groups_of, read_samples


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes, from num_samples of which num_passed passed: Chen et al. 2021,
    arXiv 2107.03374, equation 1."""
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def mean_pass_at_k(samples: Sequence[Sample], k: int, pass_reward: float) -> float | None:
    """Mean of pass@k over questions. An unjudged answer leaves n of its question; a question with fewer than k judged is left out. None if all
    are left out."""
    by_question = [rewards_of(group) for group in groups_of(samples)]
    found = [pass_at_k(len(of), sum(each >= pass_reward for each in of), k) for of in by_question if len(of) >= k]
    return fmean(found) if found else None


def answers_in(path: Path) -> list[Sample]:
    """Read the answers of a file: of an episode with several trajectories the first, which has the episode's reward."""
    return [episode[0] for episode in episodes_of(read_samples(path))]


def rewards_of(samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of the judged samples."""
    return [sample.reward for sample in samples if sample.reward is not None]


def by_question(samples: Sequence[Sample], pass_reward: float | None = None) -> dict[int, float]:
    """Return the mean reward of each question's judged answers, by prompt id; a question without any is left out.

    pass_reward: The share of these answers that have it or more, instead of the reward; None: the reward.
    """
    found = {group[0].prompt_id: rewards_of(group) for group in groups_of(samples)}
    values = {
        number: rewards if pass_reward is None else [float(reward >= pass_reward) for reward in rewards]
        for number, rewards in found.items()
    }
    return {number: fmean(of) for number, of in values.items() if of}


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean over questions with its interval; None for fewer than two."""
    if len(values) < 2:
        return None
    return Interval(mean=fmean(values), standard_error=stdev(values) / math.sqrt(len(values)), num_questions=len(values))


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Return the mean over the questions that both have of second minus first, with its interval."""
    return interval([second[number] - first[number] for number in sorted(first.keys() & second.keys())])


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each part of the reward over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (sample.reward_parts or {}).items():
            found.setdefault(name, []).append(value)
    return {} if set(found) == {WHOLE_REWARD} else {name: fmean(values) for name, values in sorted(found.items())}
