"""Golden check and canary: verify that an engine still answers correctly after a launch, a wake or the load of an adapter.

An engine that released its weights without a backup returns garbage after the wake and reports success (seen on an H200). A request
whose adapter is missing is silently served by the base model. These checks detect both numerically.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, fmean
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from infra.engines.scoring import ScoreFunction, ScoreRequest, Scores
from infra.failures import WrongAnswer
from infra.megatron.protocol.job import Canary
from infra.records import AdapterVersion
from infra.store.check_costs import counted
from infra.store.files import path_of, read_json, verified, write_json
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

GOLDEN_TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "The quick brown fox jumps over the lazy dog. 17 + 25 = 42",
)
TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 0.2, "fp8": 1.0}
"""Largest mean absolute difference of log-probs that counts as noise. Measured between SGLang's and Megatron's kernels: bfloat16 0.07 and fp8
0.47 to 0.58 at the 7B shape with random weights (docs/results/speed.md), float32 3e-6 on a CPU. It catches gross faults only: a final norm
that was doubled moved models with random weights by 3.5 to 4.1. fp8's is a choice above what was measured once, and sees less than bfloat16's."""
SAME_SERVER_NATS = {"float32": 1e-4, "bfloat16": 0.05, "fp8": 0.05}
"""The same between two answers of one server, before and after its sleep. The kernels are the same, and so are the bits of a text that is
scored alone (docs/results/h200-hand-over.md). A batch rounds differently, by 0.01 at the 30B-A3B shape. Experts that were not reloaded
moved a model with random weights by 0.14, which TOLERANCE_NATS would accept as noise."""
VISIBLE_NATS = {"float32": 1e-5, "bfloat16": 1e-2, "fp8": 1e-2}
"""An adapter that changes some token's log-prob by more than this in the trainer must change a log-prob in the engine."""

MAX_EFFECT_ERROR, NOISE_FACTOR = 0.5, 4.0
"""How far an adapter's effect on each token may differ from its effect in the trainer: this share of its mean effect, or this multiple of
the difference of both without the adapter, whichever is larger. 7B with random weights on an H200: 0.053 nats apart, with an adapter
and without."""

CERTAIN_SIGMAS = 5.0
"""A correlation so far from 0 (by Fisher's z) is not random. With a canary of 256 tokens: 0.30."""


class Golden(BaseModel):
    """The base model's log-probs at its first launch with these flags, and at its latest launch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[list[int]]
    logprobs: list[list[float]]
    is_confirmed: bool = False
    """The trainer agreed with an engine that gave these log-probs: a canary passed."""
    launch: int = 0
    since_launch: list[list[float]] = []
    """The first log-probs of the latest launch."""


@counted("golden check")
def check_base(score: ScoreFunction, tokens: list[list[int]], identity: str, dtype: str, launch: int) -> None:
    """Raises WrongAnswer if the base model's log-probs differ from those of its first launch with this identity, or from the first of this launch.

    The texts are always scored together and without others: the same batch gives the same bits.
    """
    path = _path(identity)
    scores = [answer.logprobs for answer in score([ScoreRequest(text, None) for text in tokens])]
    now = Golden(tokens=tokens, logprobs=scores, launch=launch, since_launch=scores)
    if not path.exists():
        write_json(path, now.model_dump())
        return
    before = Golden.model_validate(read_json(path))
    _compare(before.logprobs, before, now, TOLERANCE_NATS[dtype], f"those of its first launch ({path})")
    if before.launch == launch:
        _compare(before.since_launch, before, now, SAME_SERVER_NATS[dtype], f"those that this very server gave at first ({path})")
    else:
        write_json(path, before.model_copy(update={"launch": launch, "since_launch": scores}).model_dump())


def _compare(expected: list[list[float]], before: Golden, now: Golden, allowed: float, whose: str) -> None:
    for was, found in zip(expected, now.logprobs, strict=True):
        difference = mean_abs_difference(was, found)
        if not difference <= allowed:
            raise WrongAnswer(
                f"golden check: the base model's log-probabilities are off by {difference:.4g} nats on average from {whose}, allowed are "
                f"{allowed}; its weights are not what they were",
                {"before": before.model_dump(), "now": now.model_dump()},
            )


def is_known(identity: str) -> bool:
    """Whether there is a reference to compare with."""
    return _path(identity).exists()


def confirm(identity: str) -> None:
    """Mark the base model's reference as confirmed by the trainer, which is independent of the engine."""
    known = _known(identity)
    if known is not None and not known.is_confirmed:
        write_json(_path(identity), known.model_copy(update={"is_confirmed": True}).model_dump())


def forget_unconfirmed(identity: str) -> None:
    """Discard the golden reference if no trainer's canary ever confirmed it."""
    known = _known(identity)
    if known is not None and not known.is_confirmed:
        log.warning(
            "what the base model said at its first launch is forgotten: nothing has confirmed it, and the engine is unsound"
        )
        _path(identity).unlink()


def _known(identity: str) -> Golden | None:
    return Golden.model_validate(read_json(_path(identity))) if _path(identity).exists() else None


def _path(identity: str) -> Path:
    return Workspace.here().golden_references / f"{identity}.json"


class CanaryScores(NamedTuple):
    """An engine's log-probs of an adapter's canary."""

    served: list[float]
    """Log-probs with the adapter."""
    without: list[float] | None
    """Log-probs without the adapter; None: unknown."""


@counted("canary")
def check_adapter(
    score: ScoreFunction,
    adapter: AdapterVersion,
    dtype: str,
    *,
    probes_cache: bool = False,
    is_merged: bool = False,
    before: list[float] | None = None,
) -> None:
    """Raises WrongAnswer unless the engine's log-probs of the canary match the trainer's, and the adapter has the same effect on them in the
    engine as in the trainer.

    probes_cache: Also require the same log-probs through the prefix cache.
    is_merged: The adapter is merged into the weights, so the base model cannot be scored.
    before: Log-probs of these weights before the load (see `scores_without`), which must differ. None: unknown.
    """
    if adapter.canary is None:
        return
    canary, name = Canary.model_validate(read_json(verified(adapter.canary))), adapter.served_name
    questions = [ScoreRequest(canary.tokens, name, is_by_cache=True)] if probes_cache else []
    questions += (
        [ScoreRequest(canary.tokens, name)]
        if is_merged
        else [ScoreRequest(canary.tokens, name), ScoreRequest(canary.tokens, None)]
    )
    # One by one if they could not be scored again, alone, to be sure.
    # Perf: five texts in one request 39 ms, in five requests 94 ms (7B, H200, docs/results/h200-hand-over.md).
    answers = [score([question])[0] for question in questions] if is_merged else score(questions)
    by_question = dict(zip(((each.adapter_name, each.is_by_cache) for each in questions), answers, strict=True))
    served = by_question[name, False]
    if probes_cache:
        _check_prefix_cache(score, adapter, dtype, by_question[name, True], served)
    scores = CanaryScores(served.logprobs, before if is_merged else by_question[None, False].logprobs)
    _check_tolerance(adapter, canary, scores.served, dtype)
    _check_something_changes(adapter, canary, scores, dtype, None if is_merged else score)
    if scores.without is not None and not is_merged:
        _check_effect(adapter, canary, scores.served, scores.without, VISIBLE_NATS[dtype])


def _check_tolerance(adapter: AdapterVersion, canary: Canary, served: list[float], dtype: str) -> None:
    assert adapter.canary is not None
    difference = mean_abs_difference(served, canary.adapter_logprobs)
    if not difference <= TOLERANCE_NATS[dtype]:
        from_base = mean_abs_difference(served, canary.base_logprobs)
        raise WrongAnswer(
            f"canary: with adapter {adapter.served_name} the engine's log-probabilities are {difference:.4g} nats from the trainer's "
            f"(allowed {TOLERANCE_NATS[dtype]}) and {from_base:.4g} from the base model's; {path_of(adapter.canary)}",
            {"adapter": adapter.served_name, "canary": canary.model_dump(), "served": served},
        )


def _check_something_changes(
    adapter: AdapterVersion, canary: Canary, scores: CanaryScores, dtype: str, score: ScoreFunction | None
) -> None:
    """Raises WrongAnswer if the adapter changes nothing. An adapter that the engine ignores changes no bit. But a batch rounds each of its
    requests differently. So if both were scored in one batch and the difference could be rounding, each is scored again, alone.

    score: None if they were scored alone.
    """
    effect = max_abs_difference(canary.adapter_logprobs, canary.base_logprobs)
    if effect <= VISIBLE_NATS[dtype] or scores.without is None:
        return
    if score is not None and not _is_certain(canary, scores.served, scores.without):
        alone = [score([ScoreRequest(canary.tokens, name)])[0].logprobs for name in (adapter.served_name, None)]
        scores = CanaryScores(*alone)
    if scores.without is not None and max_abs_difference(scores.served, scores.without) == 0:
        raise WrongAnswer(
            f"canary: adapter {adapter.served_name} changes nothing in the engine, in the trainer it moves a token by {effect:.4g} nats",
            {"adapter": adapter.served_name, "canary": canary.model_dump(), "served": scores.served},
        )


def _is_certain(canary: Canary, served: list[float], without: list[float]) -> bool:
    """Whether the adapter's effects in the engine correlate with those in the trainer more than rounding could by chance."""
    changes, expected = _differences(served, without), _differences(canary.adapter_logprobs, canary.base_logprobs)
    if len(changes) < 4 or len(set(changes)) == 1 or len(set(expected)) == 1:
        return False
    almost_one = 1 - 1e-12
    found = max(-almost_one, min(correlation(changes, expected), almost_one))
    return math.atanh(found) * math.sqrt(len(changes) - 3) >= CERTAIN_SIGMAS


def _check_effect(adapter: AdapterVersion, canary: Canary, served: list[float], base: list[float], least: float) -> None:
    """Raises WrongAnswer if the adapter's effect differs from that in the trainer. If only a part of an adapter is served (without its experts,
    say), log-probs can still be close to the trainer's, because its effect is small compared to the tolerance of bfloat16. Differences between the
    kernels of both are in both log-probs, and cancel out."""
    expected = _differences(canary.adapter_logprobs, canary.base_logprobs)
    effect, noise = fmean(map(abs, expected)), mean_abs_difference(base, canary.base_logprobs)
    apart = mean_abs_difference(_differences(served, base), expected)
    allowed = max(MAX_EFFECT_ERROR * effect, NOISE_FACTOR * noise, least)
    log.info(
        "canary: adapter %s moves the tokens by %.2g nats on average; what it does in engine and trainer is %.2g apart, without it they are %.2g",
        adapter.served_name, effect, apart, noise,
    )  # fmt: skip
    if not apart <= allowed:
        raise WrongAnswer(
            f"canary: adapter {adapter.served_name} moves the tokens by {effect:.4g} nats on average in the trainer, and in the engine otherwise: "
            f"{apart:.4g} nats apart (allowed {allowed:.4g}; without it {noise:.4g}); part of it is not served, or served wrongly",
            {"adapter": adapter.served_name, "canary": canary.model_dump(), "served": served, "base": base},
        )


@counted("canary")
def scores_without(score: ScoreFunction, adapter: AdapterVersion) -> list[float] | None:
    """The base model's log-probs of the adapter's canary; None without a canary."""
    if adapter.canary is None:
        return None
    return score([ScoreRequest(Canary.model_validate(read_json(verified(adapter.canary))).tokens, None)])[0].logprobs


def _check_prefix_cache(score: ScoreFunction, adapter: AdapterVersion, dtype: str, by_cache: Scores, served: Scores) -> None:
    """Raises WrongAnswer if the engine's log-probs through its prefix cache differ from those computed in full.

    A cache that survived a reload holds keys and values of the old adapter, for texts that the old adapter has seen. The canary's text is
    one of them. The canary itself does not go through the cache.

    served: Its log-probs of the canary, computed in full. Scored again if the text from the cache is longer.
    """
    name, text = adapter.served_name, by_cache.text
    computed = served if served.text == text else score([ScoreRequest(text, name)])[0]
    same = computed.logprobs[-len(by_cache.logprobs) :]
    difference = mean_abs_difference(by_cache.logprobs, same)
    if not difference <= TOLERANCE_NATS[dtype]:
        raise WrongAnswer(
            f"prefix cache: with adapter {name} log-probabilities from the cache are {difference:.4g} nats from those that are "
            f"recomputed (allowed {TOLERANCE_NATS[dtype]}); it holds what another adapter made",
            {"adapter": name, "text": text, "from_cache": by_cache.logprobs, "computed": same},
        )


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def mean_abs_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference; nan if any value is."""
    return fmean(abs(a - b) for a, b in zip(left, right, strict=True))


def max_abs_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Largest absolute difference of two equally long lists."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
