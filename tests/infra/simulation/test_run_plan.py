"""The layout of a run: planned on the machine's GPUs, with what was set by hand, and refused in one line where nothing fits."""

from pathlib import Path

import pytest

from infra.config import RunConfig
from infra.config.tools.overrides import changed
from infra.forecast import remembered
from infra.forecast.remembered import MeasuredRates, layout_key
from infra.forecast.shapes import GPU_KINDS, model_of
from infra.forecast.step_forecast import compared
from infra.settings import settings
from infra.simulation.machine_plan import PlannedStep, plan_machine
from infra.simulation.run_plan import FIELDS, Host, forecast_by_measured, forecast_on, kept, kind_of, plan_run, set_by_hand

GIB = 2**30
SEVEN, HALF = model_of("qwen2.5-7b"), model_of("qwen2.5-0.5b")
FOUR, ONE = Host(4, "H100", 256 * GIB), Host(1, "H200", 256 * GIB)
SIZES = [
    *("data.num_prompts=64", "sampling.group_size=8", "data.max_prompt_tokens=512", "sampling.max_output_tokens=512"),
    *("engine.max_context_tokens=1024", "engine.max_running_requests=512", "trainer.lora.rank=16"),
]
OFF_POLICY = ["trainer.loss.correction.mode=decoupled", "trainer.loss.correction.kind=tis"]
OFF_POLICY += ["trainer.loss.correction.max_staleness=1"]
MEASURED = MeasuredRates(
    run="before",
    num_steps=4,
    running=512,
    engine_tokens_per_s=40_000,
    trainer_rows_per_s=40_000,
    mean_output_tokens=256,
    other_s=3,
    trainer_peak_gib=60,
)


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    return tmp_path


def run_of(*changes: str) -> RunConfig:
    return changed(RunConfig(), [*SIZES, *changes])


def test_all_gpus_of_the_machine_are_used_on_policy() -> None:
    found, layout = plan_run(run_of(), FOUR, SEVEN)
    assert (found.engine.replicas, found.trainer.num_processes, found.trainer.first_gpu) == (4, 4, 0)
    assert found.engine.colocation == "auto" and layout.by_hand == {}
    assert layout.lines[0] == "layout auto on 4 x H100" and any(line.startswith("1. ") for line in layout.lines)
    assert "First, because all its GPUs work in both parts" in "\n".join(layout.lines)


def test_a_run_and_the_command_plan_have_the_same_plan() -> None:
    work = PlannedStep(max_staleness=1)
    first = plan_machine("4xH100", "qwen2.5-7b", work).best[0]
    found, layout = plan_run(run_of(*OFF_POLICY), FOUR, SEVEN)
    c = first.candidate
    assert layout.forecast.parts["step_s"] == first.step_s
    assert (found.engine.replicas, found.engine.tensor_parallel) == (c.engine.replicas, c.engine.tensor_parallel)
    assert found.trainer.num_processes == c.trainer_gpus


def test_gpus_of_their_own_are_planned_only_where_samples_may_be_older() -> None:
    found, _ = plan_run(run_of(*OFF_POLICY), FOUR, SEVEN)
    assert found.engine.colocation == "separate_gpus"
    engine_gpus = (found.engine.replicas or 0) * found.engine.tensor_parallel
    assert found.trainer.first_gpu == engine_gpus and engine_gpus + found.trainer.num_processes <= 4
    with_lists, _ = plan_run(run_of(*OFF_POLICY), FOUR._replace(own_gpus=(1, 3)), SEVEN)
    assert (with_lists.engine.colocation, with_lists.trainer.first_gpu) == ("auto", 0)
    assert with_lists.engine.replicas == 1 and with_lists.trainer.num_processes <= 3


def test_what_is_set_by_hand_wins_and_is_shown() -> None:
    config = run_of("engine.tensor_parallel=2", "trainer.num_processes=2", "trainer.tensor_parallel=2")
    found, layout = plan_run(config, FOUR, SEVEN)
    assert (found.engine.tensor_parallel, found.trainer.num_processes, found.trainer.tensor_parallel) == (2, 2, 2)
    assert layout.by_hand == {"engine.tensor_parallel": 2, "trainer.num_processes": 2, "trainer.tensor_parallel": 2}
    assert "engine.tensor_parallel 2 by hand" in layout.lines[0]
    assert layout.words.endswith("(set by hand: trainer.num_processes 2, trainer.tensor_parallel 2, engine.tensor_parallel 2)")


@pytest.mark.parametrize(
    ("changes", "host", "said"),
    [
        (["engine.tensor_parallel=3"], FOUR, "fits with engine.tensor_parallel 3, set by hand: leave it out, or set layout"),
        (["trainer.num_processes=8"], FOUR, "fits with trainer.num_processes 8, set by hand"),
        (["trainer.first_gpu=2", "engine.colocation=separate_gpus"], FOUR, ""),
    ],
)
def test_a_value_that_cannot_fit_is_refused_in_one_line(changes: list[str], host: Host, said: str) -> None:
    if not said:  # own GPUs without older samples are a choice of hand, not of the plan
        assert plan_run(run_of(*changes), host, SEVEN)[0].trainer.first_gpu == 2
        return
    with pytest.raises(ValueError, match="layout auto") as refused:
        plan_run(run_of(*changes), host, SEVEN)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_model_that_fits_in_no_way_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"no layout of model 'tiny' with 1024 tokens a sample fits on 1 x H100 of 80 GiB") as no:
        plan_run(run_of(), Host(1, "H100", 256 * GIB), model_of("qwen3-30b-a3b"))
    assert "\n" not in str(no.value)


def test_a_layout_is_kept_and_a_value_of_hand_wins_over_it() -> None:
    begun, _ = plan_run(run_of(*OFF_POLICY), FOUR, SEVEN)
    again = kept(run_of(*OFF_POLICY), begun)
    assert again == begun
    assert kept(run_of(*OFF_POLICY, "engine.tensor_parallel=2"), begun).engine.tensor_parallel == 2
    assert set(set_by_hand(begun)) <= set(FIELDS)


def test_rates_that_the_machine_measured_are_used_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of()
    first, layout = plan_run(config, FOUR, SEVEN)
    assert layout.forecast.source.startswith("trainer measured: docs/results")
    known = {layout_key(first.engine, first.trainer): MEASURED}
    monkeypatch.setattr(remembered, "measured_of", lambda config, model: known)
    again, layout = plan_run(config, FOUR, SEVEN)
    assert again == first and layout.forecast.source == "measured in run before"
    rows = 64 * (512 + 8 * 256)
    assert layout.forecast.parts["train_s"] == pytest.approx(rows / 40_000 / 4)
    assert layout.lines[1] == "rates: measured in run before"


def test_a_forecast_has_seconds_and_memory_of_each_part() -> None:
    found = forecast_on(run_of(), ONE, SEVEN)
    assert found is not None
    parts = found.parts
    assert parts["step_s"] == pytest.approx(parts["rollout_s"] + parts["train_s"] + parts["hand_over_s"])
    assert parts["train_s"] == pytest.approx(15.7, rel=0.01) and parts["rollout_s"] == pytest.approx(13.0, rel=0.01)
    assert parts["engine_weights_gib"] == pytest.approx(14.19, abs=0.01)
    assert parts["kv_cache_gib"] == pytest.approx(0.8 * 143771 / 1024 - 14.19 - 0.15, abs=0.05)
    assert found.kv_token_bytes == 2 * 28 * 4 * 128 * 2
    assert forecast_on(run_of(), Host(1, "H100", 256 * GIB), model_of("qwen3-30b-a3b")) is None


def test_the_peak_is_that_of_the_micro_batches_that_the_run_will_take() -> None:
    """Of a run on two H200s whose micro-batches were left to the machine: docs/results/scale.md."""
    changes = ["data.num_prompts=32", "sampling.max_output_tokens=384", "engine.max_context_tokens=896"]
    split = ["engine.colocation=separate_gpus", "trainer.first_gpu=1"]
    own = forecast_on(run_of(*changes, *OFF_POLICY, *split), Host(2, "H200", 256 * GIB), SEVEN)
    assert own is not None and own.parts["trainer_peak_gib"] == pytest.approx(124.9, rel=0.05)
    by_hand = forecast_on(run_of("trainer.max_tokens_per_microbatch=8192"), ONE, SEVEN)
    assert by_hand is not None and 30 < by_hand.parts["trainer_peak_gib"] < 45


def test_a_kv_cache_is_that_of_each_gpu() -> None:
    found = forecast_on(run_of("engine.replicas=2", "trainer.num_processes=2"), Host(2, "H200", 256 * GIB), SEVEN)
    assert found is not None and found.engine_gpus == 2
    both = 2 * found.parts["kv_cache_gib"] * GIB / (2 * 28 * 4 * 128 * 2)  # tokens that SGLang's servers tell, both together
    compared_with = {each.part: each for each in compared(found, [{"memory/kv_cache_tokens": both}])}
    assert compared_with["kv_cache_gib"].off == pytest.approx(0)


def test_with_eight_bits_the_engines_memory_is_forecast_and_what_the_rates_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of("engine.quantization=fp8", "engine.kv_cache_dtype=fp8", "environment.name=/x.py:Game", "evaluation.every=0")
    found, plain = forecast_on(config, ONE, SEVEN), forecast_on(run_of(), ONE, SEVEN)
    assert found is not None and plain is not None
    linear = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584)  # a byte less a weight
    assert found.parts["engine_weights_gib"] == pytest.approx(plain.parts["engine_weights_gib"] - linear / GIB)
    assert found.parts["kv_cache_gib"] == pytest.approx(plain.parts["kv_cache_gib"] + linear / GIB)
    assert found.kv_token_bytes == plain.kv_token_bytes / 2
    lacks = "; without engine.quantization 'fp8' and engine.kv_cache_dtype 'fp8' and the turns of environment '/x.py:Game'"
    assert found.source == f"{plain.source}{lacks}" and "without" not in plain.source
    monkeypatch.setattr(remembered, "measured_of", lambda *_: {layout_key(config.engine, config.trainer): MEASURED})
    again = forecast_on(config, ONE, SEVEN)
    assert again is not None and again.source == "measured in run before"


def test_without_a_known_gpu_only_an_earlier_run_of_this_layout_gives_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of()
    assert forecast_by_measured(config, HALF) is None
    monkeypatch.setattr(remembered, "measured_of", lambda *_: {layout_key(config.engine, config.trainer): MEASURED})
    found = forecast_by_measured(config, HALF)
    assert found is not None and found.source == "measured in run before"
    tokens = 64 * 8 * 256
    assert found.parts["rollout_s"] == pytest.approx(tokens / 40_000)
    assert found.parts["train_s"] == pytest.approx((64 * 512 + tokens) / 40_000)
    assert found.parts["step_s"] == found.parts["rollout_s"] + found.parts["train_s"] + 3
    assert forecast_by_measured(config.but(trainer=config.trainer.but(recompute=True)), HALF) is None


def test_a_gpu_is_known_by_name_and_memory() -> None:
    assert kind_of("NVIDIA H100 80GB HBM3", GPU_KINDS["H100"].memory_bytes) == "H100"
    assert kind_of("NVIDIA GH200 480GB", 96 * GIB) is None
    assert kind_of("NVIDIA H100 MIG 1g.10gb", 10 * GIB) is None
    assert kind_of("NVIDIA L40S", 48 * GIB) is None
