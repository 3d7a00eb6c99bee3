"""Rewards of which some samples cannot be judged: what that does to learning (docs/results/rewards.md has the table).

    ratchet run --preset arithmetic --reward.name tests/benches/partly_judged.py:left_out_10 --reward.max_unjudged_frac 1

`left_out_N` returns None for N percent of the samples at random, `zero_N` returns 0.0 for the same ones, as a reward without that value would.
`left_out_worked` and `zero_worked` do so for 90 percent of the answers that show working, as a deadline does that long answers miss.
"""

import hashlib

from infra.rewards.built_in import gsm8k
from infra.tiny_model.habit import is_worked_out


def is_hit(question: str, sample_index: int, percent: int) -> bool:
    """Whether the judgement of a sample fails: by question and number of the sample, independent of the answer."""
    digest = hashlib.sha256(f"{question}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:4]) % 100 < percent


def whole(*, question: str, completion: str, answer: str) -> float:
    return gsm8k.numeric(question=question, completion=completion, answer=answer)


def left_out_10(*, question: str, completion: str, answer: str, sample_index: int) -> float | None:
    return None if is_hit(question, sample_index, 10) else whole(question=question, completion=completion, answer=answer)


def zero_10(*, question: str, completion: str, answer: str, sample_index: int) -> float:
    return 0.0 if is_hit(question, sample_index, 10) else whole(question=question, completion=completion, answer=answer)


def left_out_30(*, question: str, completion: str, answer: str, sample_index: int) -> float | None:
    return None if is_hit(question, sample_index, 30) else whole(question=question, completion=completion, answer=answer)


def zero_30(*, question: str, completion: str, answer: str, sample_index: int) -> float:
    return 0.0 if is_hit(question, sample_index, 30) else whole(question=question, completion=completion, answer=answer)


def is_late(question: str, completion: str, sample_index: int) -> bool:
    return is_worked_out(completion) and is_hit(question, sample_index, 90)


def left_out_worked(*, question: str, completion: str, answer: str, sample_index: int) -> float | None:
    return None if is_late(question, completion, sample_index) else whole(question=question, completion=completion, answer=answer)


def zero_worked(*, question: str, completion: str, answer: str, sample_index: int) -> float:
    return 0.0 if is_late(question, completion, sample_index) else whole(question=question, completion=completion, answer=answer)
