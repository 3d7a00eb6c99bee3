from statistics import fmean, pstdev

import pytest

from infra.data.arithmetic import problems
from infra.tiny_model.habit import GUESS_SPREAD, is_worked_out, lessons

ROWS = problems("train", 2000)


def number_of(answer: str) -> int:
    return int(answer.rpartition("#### ")[2])


def test_the_share_of_guesses_is_the_one_that_is_asked_for_and_the_others_are_the_data_sets_own_answers() -> None:
    taught = list(lessons(ROWS, guess_share=0.3, guess_weight=6.0, seed=0))
    assert [lesson.question for lesson in taught] == [row["question"] for row in ROWS]
    assert fmean(not is_worked_out(lesson.answer) for lesson in taught) == pytest.approx(0.3, abs=0.04)
    for lesson, row in zip(taught, ROWS, strict=True):
        assert (lesson.first_weight, lesson.answer) == (1.0, row["answer"]) or lesson.first_weight == 6.0
        assert (lesson.first_weight == 6.0) is not is_worked_out(lesson.answer)


def test_guesses_are_evenly_spread_so_that_no_batch_pushes_the_habit_more_than_another() -> None:
    guesses = [lesson.first_weight == 6.0 for lesson in lessons(ROWS, guess_share=0.2, guess_weight=6.0, seed=0)]
    assert {sum(guesses[first : first + 32]) for first in range(0, 1984, 32)} <= {6, 7}


def test_a_guess_is_a_positive_number_near_the_true_one_and_rarely_right() -> None:
    taught = list(lessons(ROWS, guess_share=1.0, guess_weight=6.0, seed=0))
    errors = [number_of(lesson.answer) - number_of(row["answer"]) for lesson, row in zip(taught, ROWS, strict=True)]
    assert min(number_of(lesson.answer) for lesson in taught) >= 1
    assert abs(fmean(errors)) < 0.5
    assert pstdev(errors) == pytest.approx(GUESS_SPREAD, rel=0.15)
    assert 0.05 < fmean(error == 0 for error in errors) < 0.15


def test_the_same_seed_gives_the_same_guesses_and_another_seed_others() -> None:
    first, same, other = (list(lessons(ROWS, guess_share=0.5, guess_weight=6.0, seed=seed)) for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize(
    ("answer", "worked"), [("5 * 2 = 10\n#### 10", True), ("#### 10", False), (" #### 10", False), ("1 #### 10", True)]
)
def test_an_answer_is_worked_out_if_anything_stands_before_its_number(answer: str, worked: bool) -> None:
    assert is_worked_out(answer) is worked
