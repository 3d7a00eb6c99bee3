"""The canary by numbers alone: the engine is a function here, and its arithmetic that of bfloat16."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.engines import golden
from infra.failures import WrongAnswer
from infra.files import record_of, write_json
from infra.megatron.job import CANARY, Canary
from infra.records import AdapterVersion, BaseModelRef

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


def checked(adapter: AdapterVersion, *, served: list[float], base: list[float], is_base: bool = True) -> None:
    engine: Callable[[list[int], str | None], list[float]] = lambda tokens, name: served if name else base  # noqa: E731
    golden.check_adapter(engine, adapter, "bfloat16", golden.heard(engine, adapter), is_base=is_base)


def test_an_adapter_that_does_what_it_does_in_the_trainer_passes_whatever_the_kernels_do(adapter: AdapterVersion) -> None:
    checked(adapter, served=moved(EFFECTS, NOISE), base=moved(NOISE))


@pytest.mark.parametrize("share", [0.0001, 0.3, -0.5, 2.0])
def test_an_adapter_that_is_served_in_part_is_caught_where_bfloat16_would_hide_it(adapter: AdapterVersion, share: float) -> None:
    served = moved([share * effect for effect in EFFECTS], NOISE)
    assert golden.mean_abs_difference(served, moved(EFFECTS)) < golden.TOLERANCE_NATS["bfloat16"], "hidden, that is"
    with pytest.raises(WrongAnswer, match=r"moves the tokens by 0\.1 nats .* \(allowed 0\.05; without it 0\.01\)") as caught:
        checked(adapter, served=served, base=moved(NOISE))
    assert caught.value.evidence


def test_an_effect_within_the_noise_of_the_kernels_is_no_ground_for_a_verdict(adapter: AdapterVersion) -> None:
    loud = [6 * value for value in NOISE]
    checked(adapter, served=moved([0.5 * value for value in NOISE], loud), base=moved(loud))


def test_where_the_base_cannot_be_asked_only_the_tolerance_counts(adapter: AdapterVersion) -> None:
    checked(adapter, served=moved(NOISE), base=moved([2 * value for value in NOISE]), is_base=False)
