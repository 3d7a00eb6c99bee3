from itertools import chain

import pytest

from infra.data.advantages import KINDS, WITHIN_GROUPS, dr_grpo, grpo, of_batch, reinforce_pp, rloo


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 1/2, squares of the differences 4 * 1/4, divided by 4 - 1
    assert grpo([1, 0, 0, 1]) == pytest.approx([s * 0.5 / ((1 / 3) ** 0.5 + 1e-6) for s in (1, -1, -1, 1)], rel=1e-12)
    # mean 2, squares of the differences 1 + 1 + 4 = 6, divided by 3 - 1
    assert grpo([1, 1, 4]) == pytest.approx([d / (3**0.5 + 1e-6) for d in (-1, -1, 2)], rel=1e-12)
    assert grpo([1, 0]) == pytest.approx([0.70710578, -0.70710578], abs=1e-8)


def test_dr_grpo_only_centres() -> None:
    assert dr_grpo([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
    assert dr_grpo([1, 1, 4]) == [-1, -1, 2]


def test_rloo_compares_with_the_others_alone() -> None:
    # 1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2
    assert rloo([1, 0, 5]) == pytest.approx([-1.5, -3.0, 4.5])
    assert rloo([1, 0]) == [1.0, -1.0]


def test_reinforce_pp_is_normalised_over_the_tokens_of_the_whole_batch() -> None:
    """Source: verl, compute_reinforce_plus_plus_outcome_advantage and masked_whiten at 1dda039, at gamma 1."""
    # tokens 1, 1, 1, 0: mean 3/4, squares of the differences 3 * 1/16 + 9/16 = 3/4, divided by 4 - 1
    assert reinforce_pp([1, 0], [3, 1]) == pytest.approx([0.25 / (0.25 + 1e-8) ** 0.5, -0.75 / (0.25 + 1e-8) ** 0.5], rel=1e-12)
    assert of_batch("reinforce_pp", [1, 0], groups=[7, 8], num_tokens=[3, 1]) == reinforce_pp([1, 0], [3, 1])


def test_a_sample_without_tokens_does_not_count_in_reinforce_pp() -> None:
    assert reinforce_pp([1, 0, 100], [3, 1, 0])[:2] == pytest.approx(reinforce_pp([1, 0], [3, 1]))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_teach_nothing(kind: str, reward: float) -> None:
    assert of_batch(kind, [reward] * 5, groups=[0] * 5, num_tokens=[1, 2, 3, 4, 5]) == [0.0] * 5


def test_a_tiny_spread_does_not_blow_up() -> None:
    assert max(map(abs, grpo([0.5, 0.5 + 1e-9]))) < 1e-3


@pytest.mark.parametrize("kind", WITHIN_GROUPS)
def test_a_group_is_compared_with_itself_only_wherever_its_samples_stand(kind: str) -> None:
    groups = [[1.0, 0.0, 3.0], [5.0, 7.0, 5.0]]
    expected = [WITHIN_GROUPS[kind](group) for group in groups]
    mixed = list(chain.from_iterable(zip(*groups, strict=True)))
    assert of_batch(kind, mixed, groups=[4, 2] * 3, num_tokens=[1] * 6) == list(chain.from_iterable(zip(*expected, strict=True)))
