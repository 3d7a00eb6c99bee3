"""Credit of episodes and turns against vectors computed by hand, and against tinker-cookbook."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from shared import sample
from turns import ONE_TURN, THREE_TURNS, TWO_TURNS, sampled, turns_apart

from infra.config import BatchConfig
from infra.data.advantages import KINDS
from infra.data.packing import packed
from infra.data.turns.credit import returns, with_advantages
from infra.store.samples import Sample

TURN = BatchConfig(advantage="dr_grpo", advantage_level="turn")
HALF = TURN.but(turn_discount=0.5)


def group() -> list[Sample]:
    """Three episodes of one task, of 2, 1 and 3 turns."""
    return [
        replace(sampled(*TWO_TURNS), reward=1.0, turn_rewards=(0.0, 1.0)),
        replace(sampled(*ONE_TURN, index=1), reward=0.25, turn_rewards=(0.25,)),
        replace(sampled(*THREE_TURNS, index=2), reward=1.25, turn_rewards=(0.5, 0.0, 0.75)),
    ]


def test_episodes_are_credited_and_masked_as_in_tinker_cookbook() -> None:
    """What compute_advantages and assemble_training_data of tinker_cookbook/rl/data_processing.py at 9dfcc3a give for these episodes.
    Theirs are shifted by one token, as targets."""
    expected: list[dict[str, list[float]]] = [
        {
            "target_tokens": [2, 3, 4, 5, 6, 7, 8, 9],
            "logprobs": [0.0, 0.0, -0.5, -0.125, 0.0, -0.25, -0.375, -0.4375],
            "advantages": [0.0, 0.0, *[0.1666666865348816] * 2, 0.0, *[0.1666666865348816] * 3],
            "mask": [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0],
        },
        {
            "target_tokens": [2, 3, 5],
            "logprobs": [0.0, 0.0, -0.75],
            "advantages": [0.0, 0.0, -0.5833333134651184],
            "mask": [0.0, 0.0, 1.0],
        },
        {
            "target_tokens": [2, 3, 4, 4, 6, 6, 7, 2, 8, 8],
            "logprobs": [0.0, 0.0, -0.625, -0.875, 0.0, 0.0, -0.9375, 0.0, -1.0, -1.125],
            "advantages": [0.0, 0.0, *[0.4166666865348816] * 2, 0.0, 0.0, 0.4166666865348816, 0.0, *[0.4166666865348816] * 2],
            "mask": [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0],
        },
    ]
    tensors = packed(with_advantages(group(), BatchConfig(advantage="dr_grpo")), BatchConfig())
    starts = tensors["cu_seqlens"]
    ours = {"target_tokens": "tokens", "logprobs": "rollout_logprobs", "advantages": "advantages", "mask": "loss_mask"}
    for number, sequence in enumerate(expected):
        for theirs, name in ours.items():
            found = tensors[name][starts[number] + 1 : starts[number + 1]]
            assert found.tolist() == pytest.approx(sequence[theirs], abs=1e-7), (number, name)


def test_a_turn_is_credited_with_its_own_and_later_rewards() -> None:
    assert [returns([each], 1.0) for each in group()] == [[1.0, 1.0], [0.25], [1.25, 0.75, 0.75]]
    assert [returns([each], 0.5) for each in group()] == [[0.5, 1.0], [0.25], [0.6875, 0.375, 0.75]]


def test_a_turn_is_compared_with_the_same_turn_of_the_others_and_with_the_last_one_of_shorter_episodes() -> None:
    """Turn 0: 0.5, 0.25, 0.6875; turn 1: 1, 0.25 (its last), 0.375; turn 2: 1 (its last), 0.25 (its last), 0.75."""
    first, second, third = with_advantages(group(), HALF)
    means = [(0.5 + 0.25 + 0.6875) / 3, (1 + 0.25 + 0.375) / 3, (1 + 0.25 + 0.75) / 3]
    assert first.turn_advantages == pytest.approx((0.5 - means[0], 1 - means[1]))
    assert second.turn_advantages == pytest.approx((0.25 - means[0],))
    assert third.turn_advantages == pytest.approx((0.6875 - means[0], 0.375 - means[1], 0.75 - means[2]))
    assert first.advantage == pytest.approx((0.5 - means[0] + 1 - means[1]) / 2)


def test_of_turns_grpo_divides_by_the_spread_at_the_turn_and_rloo_leaves_the_own_episode_out() -> None:
    spread = sqrt(sum((x - 0.479166666666667) ** 2 for x in (0.5, 0.25, 0.6875)) / 2) + 1e-6
    values = with_advantages(group(), HALF.but(advantage="grpo"))[0].turn_advantages
    assert values is not None and values[0] == pytest.approx((0.5 - 0.479166666666667) / spread)
    values = with_advantages(group(), HALF.but(advantage="rloo"))[2].turn_advantages
    assert values == pytest.approx((0.6875 - (0.5 + 0.25) / 2, 0.375 - (1 + 0.25) / 2, 0.75 - (1 + 0.25) / 2))


def test_reinforce_pp_of_turns_weighs_each_turn_by_its_tokens() -> None:
    items = [(0.5, 2), (1.0, 3), (0.25, 1), (0.6875, 2), (0.375, 1), (0.75, 2)]
    flat = [value for value, count in items for _ in range(count)]
    mean = sum(flat) / 11
    std = sqrt(sum((x - mean) ** 2 for x in flat) / 10 + 1e-8)
    found = [
        value for each in with_advantages(group(), HALF.but(advantage="reinforce_pp")) for value in each.turn_advantages or ()
    ]
    assert found == pytest.approx([(value - mean) / std for value, _ in items])


@pytest.mark.parametrize("kind", KINDS)
def test_an_outcome_alone_is_credited_equally_at_both_levels(kind: str) -> None:
    outcomes = [replace(each, turn_rewards=None) for each in group()]
    episodes = with_advantages(outcomes, BatchConfig.model_validate({"advantage": kind}))
    turns = with_advantages(outcomes, BatchConfig.model_validate({"advantage": kind, "advantage_level": "turn"}))
    for episode, turn in zip(episodes, turns, strict=True):
        assert turn.turn_advantages == pytest.approx([episode.advantage] * turn.num_turns)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_turn_are_credited_as_without_levels(kind: str) -> None:
    singles = [replace(sample(5), sample_index=n, reward=reward) for n, reward in enumerate([0.0, 1.0, 0.25])]
    configs = [BatchConfig.model_validate({"advantage": kind, "advantage_level": level}) for level in ("episode", "turn")]
    episode, turn = (packed(with_advantages(singles, config), config) for config in configs)
    assert {name: tensor.tobytes() for name, tensor in episode.items()} == {
        name: tensor.tobytes() for name, tensor in turn.items()
    }


def test_a_penalty_on_the_episode_belongs_to_its_last_turn() -> None:
    assert returns([replace(group()[2], reward=1.0)], 1.0) == [1.0, 0.5, 0.5]


def branches() -> list[Sample]:
    """Episode 0 changed its history after its first turn: two branches share that turn."""
    edited = (TWO_TURNS[0], ([9, 9], [8], [-0.5]))
    first, second = sampled(*TWO_TURNS), sampled(*edited, branch=1)
    return [replace(first, reward=1.0), replace(second, reward=1.0), replace(sampled(*ONE_TURN, index=1), reward=0.0)]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_the_branches_of_an_episode_count_once_in_the_baseline(kind: str) -> None:
    found = [each.advantage for each in with_advantages(branches(), BatchConfig.model_validate({"advantage": kind}))]
    alone = [branches()[0], branches()[2]]
    expected = [each.advantage for each in with_advantages(alone, BatchConfig.model_validate({"advantage": kind}))]
    assert found == [expected[0], expected[0], expected[1]]


def test_a_branch_with_a_reward_of_its_own_is_better_or_worse_than_its_episode() -> None:
    first, second, other = branches()
    found = with_advantages([replace(first, reward=2.0), replace(second, reward=0.0), other], BatchConfig(advantage="dr_grpo"))
    assert [each.advantage for each in found] == [1.5, -0.5, -0.5]


def test_a_token_that_two_branches_share_is_in_the_loss_once() -> None:
    tensors = packed(with_advantages(branches(), BatchConfig()), BatchConfig())
    first, second = np.split(tensors["loss_mask"], tensors["cu_seqlens"][1:-1])[:2]
    assert first.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    assert second.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert tensors["episodes"].tolist() == [0, 0, 1]


def test_equal_text_of_two_branches_that_was_sampled_twice_is_in_the_loss_twice() -> None:
    first, second, other = branches()
    spans = (second.segments[0], replace(second.segments[1], sampling_seed=99), *second.segments[2:])
    tensors = packed([first, replace(second, segments=spans), other], BatchConfig())
    assert np.split(tensors["loss_mask"], tensors["cu_seqlens"][1:-1])[1].tolist() == [0, 0, 0, 1, 1, 0, 0, 1]


def test_an_episode_that_a_limit_ended_is_masked_as_a_whole() -> None:
    cut = replace(sampled(*TWO_TURNS, stop="max_turns"), reward=1.0)
    assert not packed([cut], BatchConfig(mask_truncated=True))["loss_mask"].any()
    assert packed([cut], BatchConfig())["loss_mask"].sum() == 5


def test_a_discount_needs_the_level_of_turns() -> None:
    with pytest.raises(ValueError, match=r"turn_discount 0\.5 with advantage_level 'episode'"):
        BatchConfig(turn_discount=0.5)


def split() -> list[list[Sample]]:
    return [turns_apart(*each) for each in zip(group(), (TWO_TURNS, ONE_TURN, THREE_TURNS), strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"advantage_level": "turn"}, {"advantage_level": "turn", "turn_discount": 0.5}], ids=str)
@pytest.mark.parametrize("has_rewards", [True, False])
def test_turns_that_are_trajectories_are_credited_as_those_of_one_trajectory(
    has_rewards: bool, config: dict[str, object], kind: str
) -> None:
    def credited(samples: Sequence[Sample]) -> list[float]:
        """The advantage of each sampled token."""
        if not has_rewards:
            samples = [replace(each, turn_rewards=None) for each in samples]
        chosen = BatchConfig.model_validate(config | {"advantage": kind})
        tensors = packed(with_advantages(samples, chosen), chosen)
        found: list[float] = tensors["advantages"][tensors["loss_mask"] == 1].tolist()
        return found

    assert credited([each for episode in split() for each in episode]) == credited(group())


def test_a_discount_counts_over_the_turns_that_are_trajectories() -> None:
    assert [returns(each, 0.5) for each in split()] == [[0.5, 1.0], [0.25], [0.6875, 0.375, 0.75]]
