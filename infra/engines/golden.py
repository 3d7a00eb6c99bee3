"""Golden check and canary: an engine that was launched, woken or given an adapter shows that it still answers rightly.

An engine that released its weights without a backup answers garbage after the wake and reports success (seen on an H200), and a
request whose adapter is missing is served by the base model without a word. Both are caught here, by numbers.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from infra.engines.base import WrongAnswer
from infra.files import path_of, read_json, verified, write_json
from infra.megatron.job import Canary
from infra.records import AdapterVersion
from infra.settings import settings

GOLDEN_TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "The quick brown fox jumps over the lazy dog. 17 + 25 = 42",
)
TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest mean absolute difference of log-probabilities that is noise. bfloat16: 0.07 was measured between SGLang's and
Megatron's kernels at the 7B shape with random weights; float32 on a CPU: 3e-6."""
VISIBLE_NATS = {"float32": 1e-5, "bfloat16": 1e-2}
"""An adapter that moves some token by more than this in the trainer must move something in the engine."""

Logprobs = Callable[[list[int], str | None], list[float]]
"""(tokens, adapter name or None for the base) -> log-probabilities of tokens[1:], in nats."""


class Golden(BaseModel):
    """What the base model said when it was first launched with these flags."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[list[int]]
    logprobs: list[list[float]]


def check_base(engine: Logprobs, tokens: list[list[int]], identity: str, dtype: str) -> None:
    """Raises WrongAnswer if the base answers otherwise than at its first launch with the same identity."""
    path = settings().workspace / "golden" / f"{identity}.json"
    now = Golden(tokens=tokens, logprobs=[engine(text, None) for text in tokens])
    if not path.exists():
        write_json(path, now.model_dump())
        return
    before = Golden.model_validate(read_json(path))
    for was, found in zip(before.logprobs, now.logprobs, strict=True):
        difference = mean_abs_difference(was, found)
        if not difference <= TOLERANCE_NATS[dtype]:
            raise WrongAnswer(
                f"golden check: the base model's log-probabilities are off by {difference:.4g} nats on average from those of its "
                f"first launch ({path}), allowed are {TOLERANCE_NATS[dtype]}; its weights are not what they were"
            )


def check_adapter(engine: Logprobs, adapter: AdapterVersion, dtype: str) -> None:
    """Raises WrongAnswer unless the engine gives the canary's tokens the log-probabilities that the trainer gave them."""
    if adapter.canary is None:
        return
    canary = Canary.model_validate(read_json(verified(adapter.canary)))
    served = engine(canary.tokens, adapter.served_name)
    difference = mean_abs_difference(served, canary.adapter_logprobs)
    if not difference <= TOLERANCE_NATS[dtype]:
        from_base = mean_abs_difference(served, canary.base_logprobs)
        raise WrongAnswer(
            f"canary: with adapter {adapter.served_name} the engine's log-probabilities are {difference:.4g} nats from the trainer's "
            f"(allowed {TOLERANCE_NATS[dtype]}) and {from_base:.4g} from the base model's; {path_of(adapter.canary)}"
        )
    effect = max_abs_difference(canary.adapter_logprobs, canary.base_logprobs)
    if effect > VISIBLE_NATS[dtype] and max_abs_difference(served, engine(canary.tokens, None)) == 0:
        raise WrongAnswer(
            f"canary: adapter {adapter.served_name} changes nothing in the engine, in the trainer it moves a token by {effect:.4g} nats"
        )


def mean_abs_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """nan if anything is."""
    return fmean(abs(a - b) for a, b in zip(left, right, strict=True))


def max_abs_difference(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
