"""From rewards to advantages: one function for each kind. Used where a batch is made, and by the trainer when it changes rewards.

The branches of an episode count as one in their group's baseline: its reward is their mean. A branch with a reward of its own differs from the
episode's advantage by the difference of the rewards, on the same scale.

Sources: GRPO  DeepSeekMath (arXiv 2402.03300) eq. 3; as in verl-project/verl, verl/trainer/ppo/core_algos.py:268 at 1dda039
         Dr.GRPO  Understanding R1-Zero-like training (arXiv 2503.20783)
         RLOO  Back to basics (arXiv 2402.14740); core_algos.py:588
         REINFORCE++  arXiv 2501.03262; core_algos.py:694 and masked_whiten of verl/utils/torch_functional.py, both at gamma 1
"""

from collections.abc import Callable, Sequence
from math import fsum, sqrt
from statistics import fmean, stdev

STD_EPS = 1e-6
VARIANCE_EPS = 1e-8


def grpo(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (std + 1e-6) within one group, with the unbiased standard deviation."""
    spread = stdev(rewards) + STD_EPS
    return [centred / spread for centred in dr_grpo(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """reward - mean within one group."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others of its group, which is (reward - mean) n / (n - 1)."""
    n = len(rewards)
    return [centred * n / (n - 1) for centred in dr_grpo(rewards)]


def reinforce_pp(rewards: Sequence[float], num_tokens: Sequence[int]) -> list[float]:
    """(reward - mean) / sqrt(variance + 1e-8) over the loss tokens of the whole batch, each of which has its sample's reward.

    The variance is unbiased: divided by tokens - 1. Groups play no part.
    """
    total, first = sum(num_tokens), rewards[0]
    # From the first reward on, so that equal rewards give exactly 0.
    shifted = [reward - first for reward in rewards]
    mean = fsum(x * n for x, n in zip(shifted, num_tokens, strict=True)) / max(1, total)
    variance = fsum(n * (x - mean) ** 2 for x, n in zip(shifted, num_tokens, strict=True)) / max(1, total - 1)
    return [(x - mean) / sqrt(variance + VARIANCE_EPS) for x in shifted]


WITHIN_GROUPS: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
KINDS = (*WITHIN_GROUPS, "reinforce_pp")


def of_batch(
    kind: str, rewards: Sequence[float], groups: Sequence[int], num_tokens: Sequence[int], episodes: Sequence[int] | None = None
) -> list[float]:
    """Advantage of each sample of a batch; groups says which samples belong together, num_tokens counts their loss tokens.

    episodes: Which samples are branches of one episode. None: each is an episode of its own.
    """
    if kind == "reinforce_pp":
        return reinforce_pp(rewards, num_tokens)
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    result = [0.0] * len(rewards)
    for indices in members.values():
        of_group = [rewards[i] for i in indices]
        found = WITHIN_GROUPS[kind](of_group) if episodes is None else of_branches(kind, of_group, [episodes[i] for i in indices])
        for i, advantage in zip(indices, found, strict=True):
            result[i] = advantage
    return result


def of_branches(kind: str, rewards: Sequence[float], episodes: Sequence[int]) -> list[float]:
    """Advantage of each branch of a group's episodes."""
    branches: dict[int, list[float]] = {}
    for reward, episode in zip(rewards, episodes, strict=True):
        branches.setdefault(episode, []).append(reward)
    # A shared reward as it is: the mean of equal numbers may be rounded.
    means = {episode: each[0] if len(set(each)) == 1 else fmean(each) for episode, each in branches.items()}
    advantages = dict(zip(means, WITHIN_GROUPS[kind](list(means.values())), strict=True))
    spread = stdev(means.values()) + STD_EPS if kind == "grpo" else 1.0
    pairs = zip(rewards, episodes, strict=True)
    return [advantages[episode] + (reward - means[episode]) / spread for reward, episode in pairs]
