"""Intervals over questions: by hand, and by a simulation of answers that depend on their question."""

import math
import random
from dataclasses import replace

import pytest
from shared import sample

from infra.runs import eval_figures
from infra.store.samples import Sample

SAMPLE = sample()


def answers(*rewards: list[float | None]) -> list[Sample]:
    return [
        replace(SAMPLE, prompt_id=number, sample_index=index, reward=reward)
        for number, group in enumerate(rewards)
        for index, reward in enumerate(group)
    ]


def test_a_question_counts_once_with_the_mean_of_its_judged_answers() -> None:
    found = eval_figures.by_question(answers([1.0, 0.0, None], [None, None], [1.0, 1.0, 1.0]))
    assert found == {0: 0.5, 2: 1.0}
    assert eval_figures.by_question(answers([0.4, 0.8]), 0.5) == {0: 0.5}


def test_the_interval_is_the_mean_and_196_standard_errors_of_the_questions() -> None:
    found = eval_figures.interval([0.0, 1.0, 0.5, 0.5])
    assert found and found.num_questions == 4 and found.mean == 0.5
    assert found.standard_error == pytest.approx(math.sqrt(0.5 / 3 / 4))
    assert (found.low, found.high) == pytest.approx(
        (0.5 - 1.959964 * found.standard_error, 0.5 + 1.959964 * found.standard_error)
    )
    assert eval_figures.interval([1.0]) is None


def test_the_paired_interval_is_of_the_questions_that_both_have() -> None:
    first, second = {1: 0.2, 2: 0.9, 3: 0.5}, {1: 0.4, 2: 1.0, 4: 1.0}
    found = eval_figures.paired(first, second)
    assert found and found.num_questions == 2 and found.mean == pytest.approx(0.15)
    assert found.standard_error == pytest.approx(math.sqrt(2 * 0.05**2 / 1 / 2))
    assert eval_figures.paired({1: 0.0}, {1: 1.0}) is None


def test_95_of_100_intervals_hold_the_true_mean_where_answers_depend_on_their_question() -> None:
    """Each question has its own probability, uniform in 0 to 1; answers counted as independent would be right in far fewer."""
    rng, hits, too_narrow = random.Random(7), 0, 0
    for _ in range(400):
        questions = [[float(rng.random() < p) for _ in range(8)] for p in (rng.random() for _ in range(60))]
        found = eval_figures.interval([sum(of) / 8 for of in questions])
        naive = eval_figures.interval([reward for of in questions for reward in of])
        assert found and naive
        hits += found.low <= 0.5 <= found.high
        too_narrow += naive.low <= 0.5 <= naive.high
    assert 0.92 <= hits / 400 <= 0.98
    assert too_narrow / 400 < 0.85


def test_parts_are_means_over_the_samples_that_have_them() -> None:
    parts = [{"format": 1.0, "right": 0.0}, {"format": 0.0}, None]
    found = eval_figures.part_means([replace(SAMPLE, reward_parts=each) for each in parts])
    assert found == {"format": 0.5, "right": 0.0}
