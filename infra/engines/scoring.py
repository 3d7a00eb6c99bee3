"""Requests that check whether an engine still computes correctly: log-probs of a few short texts."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infra.failures import WrongAnswer

MAX_LOGPROB_ROUNDING = 1e-4
"""Nats by which a log-prob may exceed 0: float32 rounding of a softmax."""


class ScoreRequest(NamedTuple):
    text: list[int]
    """Token ids."""
    adapter_name: str | None
    """None: the base model."""
    is_by_cache: bool = False
    """True: score the end of the text, through the prefix cache if the engine has one. False: score all of it, computed in full."""


class Scores(NamedTuple):
    text: list[int]
    """The text of the request. Through the prefix cache, a few greedy tokens of the engine may follow it."""
    logprobs: list[float]
    """Log-probs of the text's last tokens: all but the first, or some of them through the prefix cache. Nats, at temperature 1."""


def check(question: ScoreRequest, scores: Scores) -> None:
    """Raises WrongAnswer for scores that do not fit the request: invalid log-probs, or too few of them."""
    num_expected = None if question.is_by_cache else len(question.text) - 1
    wrong = next((value for value in scores.logprobs if not math.isfinite(value) or value > MAX_LOGPROB_ROUNDING), None)
    if wrong is not None or not scores.logprobs or num_expected not in (None, len(scores.logprobs)):
        told = f"log-probability {wrong}" if wrong is not None else f"{len(scores.logprobs)} log-probabilities"
        raise WrongAnswer(
            f"asked for what it says of a text of {len(question.text)} tokens, the engine gave {told}",
            {"text": question.text, "adapter": question.adapter_name, "logprobs": scores.logprobs},
        )


ScoreFunction = Callable[[Sequence[ScoreRequest]], list[Scores]]
"""Scores requests. Several requests in one call are one batch if the engine can do that. A batch rounds differently from a single text."""
