"""Requests that check whether an engine still computes correctly: its log-probs of a few short texts."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infra.failures import WrongAnswer

MAX_LOGPROB_ROUNDING = 1e-4
"""Nats by which a log-probability may exceed 0: float32 noise of a softmax, no more."""


class ScoreRequest(NamedTuple):
    text: list[int]
    """Token ids."""
    adapter_name: str | None
    """None: the base model."""
    is_by_cache: bool = False
    """Of the end of the text, by way of the prefix cache where the engine has one; else of all of it, computed now."""


class Scores(NamedTuple):
    text: list[int]
    """That of the question; by way of the prefix cache it may go on with a few tokens of the engine's own, chosen greedily."""
    logprobs: list[float]
    """Of the text's last tokens: of all but the first, or, by way of the prefix cache, of some. Nats, at temperature 1."""


def check(question: ScoreRequest, scores: Scores) -> None:
    """Raises WrongAnswer for what is no answer to the question: no log-probability of a text, or fewer than it has."""
    num_expected = None if question.is_by_cache else len(question.text) - 1
    wrong = next((value for value in scores.logprobs if not math.isfinite(value) or value > MAX_LOGPROB_ROUNDING), None)
    if wrong is not None or not scores.logprobs or num_expected not in (None, len(scores.logprobs)):
        told = f"log-probability {wrong}" if wrong is not None else f"{len(scores.logprobs)} log-probabilities"
        raise WrongAnswer(
            f"asked for what it says of a text of {len(question.text)} tokens, the engine gave {told}",
            {"text": question.text, "adapter": question.adapter_name, "logprobs": scores.logprobs},
        )


ScoreFunction = Callable[[Sequence[ScoreRequest]], list[Scores]]
"""Several questions in one call are one batch where the engine can do that; a batch rounds otherwise than a text alone."""
