"""The forecast's fit: its arithmetic by hand, and how well it says what was measured."""

import numpy as np
import pytest

from infra.config import LoraConfig, TrainerConfig
from infra.forecast.fit import (
    GIB,
    Coefficients,
    Training,
    decoding_s,
    fit,
    fitted,
    least_squares,
    memory_terms,
    peak_bytes,
    trainer_of,
    training_s,
    work_of,
)
from infra.forecast.points import Points, TrainingPoint, measured_points
from infra.forecast.shapes import GPU_KINDS, model_of, with_layers

POINTS = measured_points()
MEMORY = [point for point in POINTS.training if point.peak_gib]
SECONDS = [point for point in POINTS.training if point.seconds]
SEVEN, MIXTURE = model_of("qwen2.5-7b"), model_of("qwen3-30b-a3b")


def without(point: TrainingPoint) -> Coefficients:
    return fit(POINTS.model_copy(update={"training": tuple(each for each in POINTS.training if each is not point)}))


def peak_gib(point: TrainingPoint, coefficients: Coefficients) -> float:
    model = with_layers(model_of(point.model), point.num_layers)
    return peak_bytes(trainer_of(point), model, work_of(point), coefficients) / GIB


def test_least_squares_find_the_coefficients_of_exact_sums() -> None:
    terms = [(1.0, 2.0, 5e9), (3.0, 1.0, 1e9), (2.0, 7.0, 2e9), (4.0, 4.0, 9e9)]
    rows = [(each, 2 * each[0] + 0.5e-9 * each[2], 1.0) for each in terms]
    assert least_squares(rows) == pytest.approx((2.0, 0.0, 0.5e-9), abs=1e-12)


def test_coefficients_are_never_negative() -> None:
    rows = [((1.0, 1.0), 1.0, 1.0), ((1.0, 2.0), 0.0, 1.0)]
    assert min(least_squares(rows)) >= 0
    with pytest.raises(ValueError, match="no fit"):
        least_squares([((1.0,), -1.0, 1.0)])


def test_equal_points_give_equal_coefficients_in_any_order() -> None:
    turned = Points(training=POINTS.training[::-1], rollout=POINTS.rollout[::-1])
    for a, b in zip(fit(POINTS), fit(turned), strict=True):
        assert np.allclose(a, b)
    assert fit(POINTS) == fitted()


@pytest.mark.parametrize("point", MEMORY, ids=lambda p: f"{p.model}-{p.gpu}-{p.microbatch_rows}-{p.rank}-{p.recompute}")
def test_peak_memory_that_the_fit_has_not_seen_is_within_five_percent(point: TrainingPoint) -> None:
    assert peak_gib(point, without(point)) == pytest.approx(point.peak_gib, rel=0.07 if point.recompute else 0.05)


@pytest.mark.parametrize("point", SECONDS, ids=lambda p: f"{p.model}-{p.gpu}-{p.microbatch_rows}-{p.rank}")
def test_seconds_that_the_fit_has_not_seen_are_within_fifteen_percent(point: TrainingPoint) -> None:
    model = with_layers(model_of(point.model), point.num_layers)
    work = work_of(point)._replace(passes=1)
    assert training_s(trainer_of(point), model, GPU_KINDS[point.gpu], work, without(point)) == pytest.approx(
        point.seconds, rel=0.15
    )


def test_memory_terms_are_those_of_the_architecture() -> None:
    trainer = TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=16))
    rows, logits = 1000, 800
    found = memory_terms(trainer, SEVEN.architecture, rows, logits)
    assert found == (2 * rows * 28 * 3584, 2 * rows * 28 * 18944, 2 * rows * 28 * 3584, logits * 152064)
    split = memory_terms(trainer.but(num_processes=2, tensor_parallel=2), SEVEN.architecture, rows, logits)
    assert split == (found[0], found[1] / 2, found[2] / 2, found[3] / 2)
    again = memory_terms(trainer.but(recompute=True), SEVEN.architecture, rows, logits)
    assert again == (found[0] / 28, found[1] / 28, found[2] / 28, found[3])
    assert memory_terms(trainer, MIXTURE.architecture, rows, logits)[1] == 2 * rows * 48 * 8 * 768


def test_more_work_takes_longer() -> None:
    trainer, work = TrainerConfig(dtype="bfloat16"), Training(294400, 262144, 1024, 13821, 12288)
    seconds = training_s(trainer, SEVEN, GPU_KINDS["H100"], work)
    assert training_s(trainer, SEVEN, GPU_KINDS["H100"], work._replace(passes=1.45)) == pytest.approx(1.45 * seconds)
    assert training_s(trainer.but(recompute=True), SEVEN, GPU_KINDS["H100"], work) == pytest.approx(1.45 * seconds)
    assert training_s(trainer, SEVEN, GPU_KINDS["A100"], work) > 2 * seconds
    assert decoding_s(SEVEN, 16, GPU_KINDS["H100"], 512) > decoding_s(SEVEN, 16, GPU_KINDS["H100"], 1)
    assert decoding_s(MIXTURE, 16, GPU_KINDS["H100"], 1) < 0.7 * decoding_s(MIXTURE, 16, GPU_KINDS["H100"], 128)


def test_every_point_names_the_page_that_has_it() -> None:
    assert all(point.source.startswith("docs/") or point.source.startswith("tests/gpu/forecast.py") for point in POINTS.training)
    assert all(point.source.startswith("docs/results/") for point in POINTS.rollout)
