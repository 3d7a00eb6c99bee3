"""Rewards for the shape of a completion, right or wrong: its length and its format. They go with another reward, by weight.

Source of both rules: huggingface/trl, trl/rewards/other_rewards.py and format_rewards.py at f2cd577 (Apache-2.0).
"""

from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.signatures import Fields

LONGEST, SOFT = "max_completion_len", "soft_punish_cache"
OPEN, CLOSE = "<think>", "</think>"


class OverlongPenalty(BuiltIn):
    """DAPO's soft penalty: 0 up to `soft_punish_cache` tokens below `max_completion_len`, from there down to -1 at it, -1 beyond."""

    def __call__(self, *, output_tokens: list[int], row: Fields) -> float:
        longest, soft = _limits(row)
        over = len(output_tokens) - (longest - soft)
        return 0.0 if over <= 0 else -min(over / soft, 1.0) if soft else -1.0

    def check_row(self, answer: str, row: Fields) -> None:
        _limits(row)


def _limits(row: Fields) -> tuple[int, int]:
    longest, soft = (_tokens(row, column) for column in (LONGEST, SOFT))
    if soft > longest:
        raise ValueError(f"the row's column {SOFT!r} is {soft}: give at most its {LONGEST!r}, {longest}")
    return longest, soft


def _tokens(row: Fields, column: str) -> int:
    found = row.get(column)
    if not isinstance(found, int | float) or isinstance(found, bool) or found < 0 or not float(found).is_integer():
        raise ValueError(f"the row's column {column!r} is {shown(found)}: overlong_penalty needs a number of tokens there")
    return int(found)


class ThinkFormat(BuiltIn):
    """1 if the completion begins with `<think>`, the only one, and has a `</think>`; else 0."""

    def __call__(self, *, completion: str) -> float:
        return float(completion.startswith(OPEN) and completion.count(OPEN) == 1 and CLOSE in completion)
