"""A forecast beside what was measured."""

import pytest

from infra.forecast.step_forecast import PARTS, StepForecast, compared, metrics_of, table

FORECAST = StepForecast(
    parts={
        "rollout_s": 9.0,
        "train_s": 30.0,
        "hand_over_s": 1.0,
        "engine_weights_gib": 14.0,
        "kv_cache_gib": 2.0,
        "engine_gib": 55.0,
    },
    source="made up",
    sharing="in turns",
    engine_gpus=2,
    kv_token_bytes=2**10,
)
FIGURES = {
    "time/roll_out_s": 10.0,
    "time/train_s": 20.0,
    "gpu_idle/to_training_s": 0.5,
    "gpu_idle/to_sampling_s": 0.75,
    "memory/engine_inference_gib": 100.0,
    "memory/kv_cache_tokens": 2.0**20,
}


def test_each_part_is_compared_with_the_median_of_the_steps() -> None:
    found = {each.part: each for each in compared(FORECAST, [FIGURES, FIGURES | {"time/train_s": 22.0}, FIGURES])}
    assert found["train_s"].measured == 20 and found["train_s"].off == 0.5
    assert found["rollout_s"].off == pytest.approx(-0.1)
    assert found["hand_over_s"].measured == 1.25
    assert found["engine_gib"].measured == 50  # of each of two GPUs
    assert found["kv_cache_gib"].measured == 1
    assert found["engine_weights_gib"].measured is None and found["engine_weights_gib"].off is None
    assert list(found) == [part for part in PARTS if part in FORECAST.parts]


def test_a_part_that_was_not_measured_is_not_compared() -> None:
    found = {each.part: each.measured for each in compared(FORECAST, [{"gpu_idle/to_training_s": 0.5}])}
    assert set(found.values()) == {None}


def test_no_hand_over_is_compared_where_the_next_rollout_begins_in_the_training() -> None:
    beside = FIGURES | {"gpu_idle/to_training_s": 0.4, "gpu_idle/to_sampling_s": -4.0}
    assert {each.part: each.measured for each in compared(FORECAST, [beside])}["hand_over_s"] is None


def test_metrics_begin_with_the_second_step() -> None:
    assert metrics_of(FORECAST, 0, FIGURES) == {} == metrics_of(None, 5, FIGURES)
    found = metrics_of(FORECAST, 1, FIGURES)
    assert found["forecast/train_s"] == 30 and found["forecast/train_s_off_frac"] == 0.5
    assert "forecast/engine_weights_gib" in found and "forecast/engine_weights_gib_off_frac" not in found


def test_the_table_shows_units_and_the_difference() -> None:
    rows = table(FORECAST, [FIGURES])
    assert ("train", "30 s", "20 s", "+50%") in rows and ("engine's weights, each GPU", "14 GiB", "-", "-") in rows
