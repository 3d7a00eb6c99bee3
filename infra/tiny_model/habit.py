"""The bad habit of a warm-started model: it can work a sum out, and mostly guesses instead.

Base models that people train are like that: able, and in need of being shown when to use what they can. A share of the answers in
the warm start is a bare guess, a number near the true one with no working before it; the others are worked out and right. The
guesses belong to the warm start alone: no row of the data set has one.
"""

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

GUESS_SPREAD = 4.0
"""Standard deviation of a guess around the true number: one in ten is right, by chance."""


class Lesson(NamedTuple):
    """A question with the answer that the model is taught to give."""

    question: str
    answer: str
    first_weight: float = 1.0
    """Of the answer's first token in the loss: it decides between working out and guessing."""


def lessons(rows: Iterable[dict[str, str]], *, guess_share: float, guess_weight: float, seed: int) -> Iterator[Lesson]:
    """A lesson for each row, guess_share of them guesses; the same seed gives the same guesses at the same places."""
    rng = random.Random(f"habit/{seed}")
    for row in rows:
        if rng.random() < guess_share:
            yield Lesson(row["question"], _guess(row["answer"], rng), guess_weight)
        else:
            yield Lesson(row["question"], row["answer"])


def _guess(solution: str, rng: random.Random) -> str:
    truth = int(solution.rpartition("####")[2])
    return f"#### {max(1, truth + round(rng.gauss(0, GUESS_SPREAD)))}"


def is_worked_out(answer: str) -> bool:
    """Whether an answer has any working before its number."""
    return not answer.lstrip().startswith("####")
