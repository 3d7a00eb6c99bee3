"""Rates that a run measured are kept for the next one, by model, processor and layout; a damaged file counts as none."""

import logging
from pathlib import Path

import pytest

from infra.config import RunConfig
from infra.config.tools.overrides import changed
from infra.forecast import remembered
from infra.forecast.rates import Rates
from infra.forecast.remembered import layout_key, measured_of, medians, rates_by, remember
from infra.forecast.shapes import model_of
from infra.settings import settings

HALF, SEVEN = model_of("qwen2.5-0.5b"), model_of("qwen2.5-7b")
CONFIG = changed(RunConfig(), ["name=mine", "data.num_prompts=4", "sampling.group_size=2", "data.max_prompt_tokens=10"])


def step(train_s: float = 2.0, tokens_per_s: float = 100.0) -> dict[str, float]:
    return {
        "rollout/tokens_per_s": tokens_per_s,
        "rollout/output_tokens": 160.0,
        "rollout/mean_output_tokens": 20.0,
        "time/train_s": train_s,
        "time/roll_out_s": 1.5,
        "time/step_s": 5.0,
        "memory/training_gib": 3.0,
        "memory/engine_inference_gib": 7.0,
        "gpu_idle/to_training_s": 0.5,
        "gpu_idle/to_sampling_s": 0.25,
    }


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    return tmp_path


def test_medians_are_those_of_the_steps_after_the_first() -> None:
    found = medians(CONFIG, [step(90.0, 1.0), step(2.0), step(4.0), step(2.0, 300.0)])
    assert found is not None
    assert (found.run, found.num_steps, found.running, found.engine_tokens_per_s) == ("mine", 3, 8, 100)
    assert found.trainer_rows_per_s == (4 * 10 + 160) / 2
    assert found.other_s == 1.5
    assert (found.mean_output_tokens, found.hand_over_s, found.trainer_peak_gib, found.engine_gib) == (20, 0.75, 3, 7)


def test_a_hand_over_that_lay_in_the_next_rollout_is_not_remembered() -> None:
    found = medians(CONFIG, [step(), step() | {"gpu_idle/to_sampling_s": -4.0}])
    assert found is not None and found.hand_over_s is None


def test_rates_are_those_of_each_gpu() -> None:
    config = changed(CONFIG, ["engine.replicas=2", "engine.tensor_parallel=2", "trainer.num_processes=4"])
    found = medians(config, [step(), step()])
    assert found is not None
    assert (found.running, found.engine_tokens_per_s, found.trainer_rows_per_s) == (4, 25, 25)


def test_replicas_that_the_machine_decides_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(CONFIG, ["engine.replicas=auto"])
    for name in ("ENGINE", "TRAINER"):
        monkeypatch.setenv(f"RATCHET_{name}_GPUS", "[0, 1, 2, 3]")
    settings.cache_clear()
    found = medians(config, [step(), step()])
    assert found is not None and (found.running, found.engine_tokens_per_s) == (2, 25)
    assert layout_key(config.engine, config.trainer).startswith("engine 4 x TP 1;")


def test_replicas_that_a_cluster_s_nodes_decide_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "10.0.0.1:6379")
    settings.cache_clear()
    remember(changed(CONFIG, ["engine.replicas=auto"]), HALF, [step(), step()])
    assert measured_of(CONFIG, HALF) == {}


def test_one_step_alone_is_not_remembered(workspace: Path) -> None:
    remember(CONFIG, HALF, [step()])
    remember(CONFIG, HALF, [step(), {"time/step_s": 1.0}])  # a rollout that was taken over measured nothing
    assert not (workspace / "rates.json").exists() and measured_of(CONFIG, HALF) == {}


def test_a_run_of_the_same_model_and_layout_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(CONFIG, HALF, [step(), step()])
    other = changed(CONFIG, ["trainer.recompute=true", "name=other"])
    remember(other, HALF, [step(), step(8.0)])
    found = measured_of(CONFIG, HALF)
    assert found[layout_key(CONFIG.engine, CONFIG.trainer)].trainer_rows_per_s == 100
    assert found[layout_key(other.engine, other.trainer)].run == "other" and len(found) == 2
    assert measured_of(CONFIG, SEVEN) == {}
    assert measured_of(changed(CONFIG, ["trainer.loss.kl.coefficient=0.1"]), HALF) == {}
    monkeypatch.setattr(remembered.devices, "processor", lambda: "another processor")
    assert measured_of(CONFIG, HALF) == {}


@pytest.mark.parametrize(
    "change",
    [
        "engine.quantization=fp8",
        "engine.kv_cache_dtype=fp8",
        "trainer.share_experts=true",
        "trainer.routing_replay=true",
        "environment.name=/x.py:Game",
    ],
)
def test_rates_of_a_run_that_samples_or_trains_in_another_way_are_not_taken(change: str) -> None:
    decoupled = 'trainer.loss.correction={"mode": "decoupled", "kind": "tis"}'  # which 8 bits would change too
    config = changed(CONFIG, [decoupled, "evaluation.every=0"])
    remember(config, HALF, [step(), step()])
    assert measured_of(config, HALF) and measured_of(changed(config, [change]), HALF) == {}


@pytest.mark.parametrize("content", [b"{", b'{"a": {"b": {"run": "x"}}}', b"[]", b'{"a": {"b": null}}', b"\xff\xfe"])
def test_a_damaged_or_foreign_file_is_ignored_with_one_line(
    content: bytes, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (workspace / "rates.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert measured_of(CONFIG, HALF) == {}
        assert len(caplog.records) == 1 and "rates.json" in caplog.text and "set aside" in caplog.text
        remember(CONFIG, HALF, [step(), step()])
    assert len(measured_of(CONFIG, HALF)) == 1


def test_measured_rates_give_what_was_measured_at_as_many_samples() -> None:
    found = medians(CONFIG, [step(), step()])
    assert found is not None
    alone = rates_by(found)
    assert (alone.engine_tokens_per_s, alone.request_tokens_per_s, alone.trainer_rows_per_s) == (100, 100 / 8, 100)
    assert alone.source == "measured in run mine"
    assert rates_by(found, Rates(1.0, 50.0, 1.0, "")).request_tokens_per_s == 50
