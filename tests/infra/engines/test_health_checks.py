"""The canary by numbers alone: the engine is a function here, and its arithmetic that of bfloat16."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.engines import health_checks
from infra.engines.scoring import ScoreRequest, Scores
from infra.failures import WrongAnswer
from infra.megatron.protocol.job import CANARY, Canary
from infra.records import AdapterVersion, BaseModelRef
from infra.store.files import read_json, record_of, write_json

BASE = [-1.0, -2.0, -3.0, -4.0]
EFFECTS = [0.1, -0.1, 0.16, -0.04]
"""Of the adapter on each token, in the trainer: 0.1 nats on average, half of what bfloat16 allows between engine and trainer."""
NOISE = [0.01, -0.01, 0.01, -0.01]


def moved(*terms: list[float]) -> list[float]:
    return [sum(values) for values in zip(BASE, *terms, strict=True)]


@pytest.fixture
def adapter(base: BaseModelRef, workspace: Path) -> AdapterVersion:
    told = Canary(tokens=[1, 2, 3, 4, 5], base_logprobs=BASE, adapter_logprobs=moved(EFFECTS))
    canary = record_of(write_json(workspace / "runs/r/adapters/000001" / CANARY, told.model_dump()))
    return AdapterVersion(
        run="r", version=1, base=base, rank=4, alpha=8, target_modules=("q_proj",), seed=0, weights=canary, canary=canary
    )


def checked(adapter: AdapterVersion, *, served: list[float], base: list[float], is_merged: bool = False) -> None:
    def score(questions: Sequence[ScoreRequest]) -> list[Scores]:
        return [Scores(each.text, served if each.adapter_name else base) for each in questions]

    health_checks.check_adapter(score, adapter, "bfloat16", is_merged=is_merged, before=base if is_merged else None)


def test_an_adapter_that_does_what_it_does_in_the_trainer_passes_whatever_the_kernels_do(adapter: AdapterVersion) -> None:
    checked(adapter, served=moved(EFFECTS, NOISE), base=moved(NOISE))


@pytest.mark.parametrize("share", [0.0001, 0.3, -0.5, 2.0])
def test_an_adapter_that_is_served_in_part_is_caught_where_bfloat16_would_hide_it(adapter: AdapterVersion, share: float) -> None:
    served = moved([share * effect for effect in EFFECTS], NOISE)
    assert health_checks.mean_abs_difference(served, moved(EFFECTS)) < health_checks.TOLERANCE_NATS["bfloat16"], "hidden, that is"
    with pytest.raises(WrongAnswer, match=r"moves the tokens by 0\.1 nats .* \(allowed 0\.05; without it 0\.01\)") as caught:
        checked(adapter, served=served, base=moved(NOISE))
    assert caught.value.evidence


def test_an_effect_within_the_noise_of_the_kernels_is_no_ground_for_a_verdict(adapter: AdapterVersion) -> None:
    loud = [6 * value for value in NOISE]
    checked(adapter, served=moved([0.5 * value for value in NOISE], loud), base=moved(loud))


def test_where_the_base_cannot_be_asked_only_the_tolerance_counts(adapter: AdapterVersion) -> None:
    checked(adapter, served=moved(NOISE), base=moved([2 * value for value in NOISE]), is_merged=True)


class RoundingEngine:
    """Rounds what is asked with an adapter in one batch with another text otherwise than what is asked alone."""

    def __init__(self, effect: list[float], rounding: list[float]) -> None:
        self.effect, self.rounding = effect, rounding
        self.batches: list[list[str | None]] = []
        """Adapters that were asked for."""

    def __call__(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        self.batches.append([each.adapter_name for each in questions])
        rounding = self.rounding if len(questions) > 1 else [0.0] * len(BASE)
        return [Scores(each.text, moved(self.effect, rounding) if each.adapter_name else BASE) for each in questions]


def test_an_adapter_that_is_passed_over_is_found_out_though_its_batch_rounds_it_otherwise(adapter: AdapterVersion) -> None:
    engine, name = RoundingEngine([0.0] * 4, NOISE), adapter.served_name
    with pytest.raises(WrongAnswer, match=r"changes nothing in the engine, in the trainer it moves a token by 0\.16 nats"):
        health_checks.check_adapter(engine, adapter, "bfloat16")
    assert engine.batches == [[name, None], [name], [None]]


def test_with_and_without_are_asked_in_one_batch_and_only_once_where_the_effect_is_beyond_doubt(adapter: AdapterVersion) -> None:
    engine = RoundingEngine(EFFECTS, [0.0] * 4)
    health_checks.check_adapter(engine, adapter, "bfloat16")
    assert engine.batches == [[adapter.served_name, None]]


def test_merged_weights_are_asked_alone_since_nothing_could_be_asked_again(adapter: AdapterVersion) -> None:
    engine = RoundingEngine(EFFECTS, NOISE)
    health_checks.check_adapter(engine, adapter, "bfloat16", probes_cache=True, is_merged=True, before=BASE)
    assert engine.batches == [[adapter.served_name], [adapter.served_name]]


class CachingEngine:
    """Says more of a text by way of its cache, if it is one that goes on, and what a stale cache would."""

    def __init__(self, *, goes_on: bool, off_by: float = 0.0) -> None:
        self.goes_on, self.off_by = goes_on, off_by
        self.num_batches = 0

    def __call__(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        self.num_batches += 1
        return [self.by_cache(each) if each.is_by_cache else self.computed(each) for each in questions]

    @staticmethod
    def computed(question: ScoreRequest) -> Scores:
        return Scores(question.text, [*(moved(EFFECTS) if question.adapter_name else BASE), -0.5, -0.6][: len(question.text) - 1])

    def by_cache(self, question: ScoreRequest) -> Scores:
        scores = self.computed(ScoreRequest([*question.text, 8, 9] if self.goes_on else question.text, question.adapter_name))
        return Scores(scores.text, [value + self.off_by for value in scores.logprobs[-2:]])


@pytest.mark.parametrize(("goes_on", "num_batches"), [(False, 1), (True, 2)])
def test_the_prefix_cache_is_probed_in_the_canarys_own_batch(adapter: AdapterVersion, goes_on: bool, num_batches: int) -> None:
    engine = CachingEngine(goes_on=goes_on)
    health_checks.check_adapter(engine, adapter, "bfloat16", probes_cache=True)
    assert engine.num_batches == num_batches, "what a text goes on with has to be computed too"
    with pytest.raises(WrongAnswer, match=r"prefix cache: .* are 0\.3 nats from those that are recomputed \(allowed 0\.2\)"):
        health_checks.check_adapter(CachingEngine(goes_on=goes_on, off_by=0.3), adapter, "bfloat16", probes_cache=True)


def test_all_golden_texts_are_asked_in_one_batch(workspace: Path) -> None:
    batches = []

    def score(questions: Sequence[ScoreRequest]) -> list[Scores]:
        batches.append(questions)
        return [Scores(each.text, [-float(token) for token in each.text[1:]]) for each in questions]

    health_checks.check_base(score, [[1, 2], [3, 4]], "an engine", "float32", launch=1)
    assert batches == [[ScoreRequest([1, 2], None), ScoreRequest([3, 4], None)]]
    told = health_checks.Golden.model_validate(read_json(workspace / "golden/an engine.json"))
    assert told.logprobs == [[-2.0], [-4.0]], "each text has its own answer"


def test_a_server_must_answer_as_it_did_before_its_sleep_more_closely_than_another_one_must(workspace: Path) -> None:
    """Experts that were not read again moved the log-probabilities of a model with random weights by 0.14 nats (one H200)."""

    def check(launch: int, off_by: float) -> None:
        scores = Scores([1, 2, 3, 4, 5], moved([off_by] * 4))
        health_checks.check_base(lambda questions: [scores], [scores.text], "an engine", "bfloat16", launch)

    check(1, 0.0)
    check(1, 0.04)
    with pytest.raises(WrongAnswer, match=r"off by 0\.14 nats .* this very server gave at first .* allowed are 0\.05"):
        check(1, 0.14)
    check(2, 0.14)  # another server: other kernels may have been chosen
    check(2, 0.17)
    with pytest.raises(WrongAnswer, match=r"this very server"):
        check(2, 0.0)  # each is measured by its own first answers
    with pytest.raises(WrongAnswer, match=r"off by 0\.25 nats .* its first launch .* allowed are 0\.2"):
        check(3, 0.25)
