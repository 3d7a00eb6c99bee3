"""Check that a data set's own answers are correct according to the chosen reward."""

from collections.abc import Iterable
from functools import cache

from infra.config import DataConfig
from infra.data import dataset
from infra.data.dataset import Row
from tasks.rewards import BUILT_IN, called, find, gsm8k

NUM_SHOWN = 3


def reward_of_own_answer(name: str, row: Row) -> float:
    """Return the reward of a row's own answer as a completion; in the form `#### answer` where the reward is built in.

    Raises:
        RewardFailed: as rewards.called does.
    """
    completion = f"#### {gsm8k.ground_truth(row.answer)}" if name in BUILT_IN else row.answer
    return sum(called(name, find(name), question=row.question, completion=completion, answer=row.answer).values())


@cache
def check_data_set(name: str, config: DataConfig) -> None:
    """Check all training rows. Raises ValueError as check_own_answers does."""
    rows = dataset.rows(config)
    check_own_answers(name, config.source, ((number, rows[number]) for number in dataset.part_rows(config)))


def check_own_answers(name: str, source: str, rows: Iterable[tuple[int, Row]]) -> None:
    """Score each row's own final answer with a built-in reward, in the form `#### answer`. A user's own rewards are not checked.

    rows: Rows with their numbers in the data set.

    Raises:
        ValueError: for answers that do not score 1, since no completion could either; with counts and the first three rows.
    """
    if name not in BUILT_IN:
        return
    num_rows, wrong = 0, []
    for number, row in rows:
        num_rows += 1
        if reward_of_own_answer(name, row) != 1.0:
            wrong.append(f"row {number} {gsm8k.ground_truth(row.answer)[-60:]!r}")
    if wrong:
        shown = ", ".join([*wrong[:NUM_SHOWN], *(["..."] if len(wrong) > NUM_SHOWN else [])])
        raise ValueError(
            f"reward {name!r} gives {len(wrong)} of {num_rows} rows of data set {source!r} less than 1 for their own answers: {shown}: "
            "make each answer a number, or a solution that ends in '#### 42', or choose another reward"
        )
