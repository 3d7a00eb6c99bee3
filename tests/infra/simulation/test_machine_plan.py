"""The plan of a machine: memory and seconds that can be worked out by hand, what fits, and what is never proposed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from infra.colocation import trainer_memory
from infra.config import LoraConfig, RunConfig
from infra.config.tools.overrides import changed
from infra.forecast.fit import fitted
from infra.forecast.rates import Rates, rates_of
from infra.forecast.shapes import GPU_KINDS, SHAPES, gpus_in, model_of
from infra.models.architecture import base_shapes, num_active
from infra.simulation import plan_words
from infra.simulation.machine_plan import GIB, Candidate, Given, PlannedStep, candidates, plan_machine, simulated
from infra.simulation.scenario import Scenario

SEVEN = model_of("qwen2.5-7b")
ROUND = Rates(1000.0, 10.0, 100.0, "made up")
SMALL = PlannedStep(num_prompts=4, group_size=2, prompt_tokens=50, output_tokens=100)


def on(count: int, kind: str = "H200", work: PlannedStep = SMALL, model: str = "qwen2.5-7b") -> list[Candidate]:
    return list(candidates(count, kind, model_of(model), work, ROUND))


def test_weights_of_a_shape_are_those_of_its_published_model() -> None:
    assert SEVEN.weight_bytes == 2 * 7_615_616_512
    assert model_of("qwen2.5-0.5b").weight_bytes == 2 * 494_032_768
    assert model_of("qwen3-30b-a3b").weight_bytes == 2 * 30_532_122_624
    mixture = model_of("qwen3-30b-a3b").architecture
    sizes = {name: math.prod(shape) for name, shape in base_shapes(mixture).items()}
    assert num_active(mixture, sizes) == pytest.approx(3.35e9, rel=0.01)


def test_a_folder_is_read_as_the_shape_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2.5-7b"]))
    assert model_of(str(tmp_path)) == SEVEN


def test_seconds_of_a_step_in_turns_are_those_of_its_parts() -> None:
    (planned,) = plan_machine("1xH200", "qwen2.5-7b", PlannedStep()).best
    rollout_s, train_s = 64 * 8 * 512 / 20150, (64 * 512 + 64 * 8 * 512) / (294912 / 15.7)
    assert planned.train_s == pytest.approx(train_s) == pytest.approx(15.7)
    assert planned.rollout_s == pytest.approx(rollout_s)
    assert planned.step_s == pytest.approx(rollout_s + 0.4 + train_s + 0.79)


def test_seconds_with_own_gpus_are_those_of_the_longer_part() -> None:
    found = plan_machine("2xH200", "qwen2.5-7b", PlannedStep()).best
    split = next(each for each in found if each.candidate.is_split)
    assert split.step_s == pytest.approx(15.7 + 0.4 + 0.79)


def test_a_step_with_own_gpus_is_never_shorter_than_one_rollout() -> None:
    """The engine makes one rollout at a time."""
    for each in plan_machine("4xH100", "qwen2.5-7b", PlannedStep(max_staleness=2)).best:
        assert each.step_s >= each.rollout_s and each.step_s >= each.train_s


def test_memory_is_what_is_held_and_the_fit_to_measured_peaks() -> None:
    (planned,) = plan_machine("1xH200", "qwen2.5-7b", PlannedStep()).best
    c = planned.candidate
    lora = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    rows, logits = 3 * (512 + 8 * 512), 3 * 8 * 512  # three groups fit into 16,384 tokens
    terms = (2 * rows * 28 * 3584, 2 * rows * 28 * 18944, 2 * rows * 28 * 3584, logits * 152064)
    peak = 2 * 7_615_616_512 + 16 * lora + sum(a * b for a, b in zip(terms, fitted().memory, strict=True))
    kept = 2.5 * GIB + 2 * 2 * lora + 2 * 7_615_616_512
    assert c.engine.colocation == "keep_weights" and c.trainer.microbatch_tokens == 16384
    assert c.trainer_gib == pytest.approx((peak + kept) / GIB)
    assert c.engine_gib == pytest.approx(0.8 * 143771 / 1024 + 2.5)


@pytest.mark.parametrize(("model", "heads"), [("qwen2.5-0.5b", 2), ("qwen2.5-7b", 4), ("qwen3-30b-a3b", 4)])
def test_tensor_parallelism_stays_within_the_key_value_heads(model: str, heads: int) -> None:
    found = on(8, model=model)
    assert {c.engine.tensor_parallel for c in found} == {size for size in (1, 2, 4) if size <= heads}
    assert max(c.trainer.tensor_parallel for c in found) <= heads
    assert all(c.trainer.sequence_parallel == (c.trainer.tensor_parallel > 1) for c in found)


def test_nothing_is_proposed_that_does_not_fit() -> None:
    for kind in ("H100", "H200"):
        found = on(4, kind, PlannedStep(), "qwen3-30b-a3b")
        total = GPU_KINDS[kind].memory_bytes / GIB
        assert found
        assert all(c.trainer_gib + trainer_memory.TRAINING_SLACK_BYTES / GIB <= total and c.engine_gib <= total for c in found)
        assert all(c.scenario.max_running_requests >= 1 for c in found)


def test_experts_are_spread_only_in_numbers_that_divide_them() -> None:
    found = on(6, model="qwen3-30b-a3b")
    assert any(c.trainer.expert_parallel > 1 for c in found)
    assert all(128 % c.trainer.expert_parallel == 0 for c in found)


@pytest.mark.parametrize(
    ("model", "kind", "max_staleness", "least"), [("qwen2.5-7b", "H200", 1, 1), ("qwen3-30b-a3b", "H100", 0, 2)]
)
def test_more_gpus_are_never_slower(model: str, kind: str, max_staleness: int, least: int) -> None:
    """On-policy, the mixture fits on 2 and 4 H100s, and not on 3 or 5: then some are left over."""
    work = PlannedStep(num_prompts=16, max_staleness=max_staleness)
    seconds = [plan_machine(f"{count}x{kind}", model, work).best[0].step_s for count in range(least, 9)]
    assert seconds == sorted(seconds, reverse=True)


def test_two_replicas_gain_what_the_results_say() -> None:
    """docs/results/scale.md, 0.5B on one and two H200s: 64 prompts, 8 samples of 256 tokens."""
    sizes = {"num_prompts": 64, "group_size": 8, "prompt_tokens": 150, "mean_tokens": 256, "max_tokens": 256, "log_spread": 0}
    rates = {"request_tokens_per_s": 117.5, "replica_tokens_per_s": 35900, "trainer_tokens_per_s": 1e12, "trainer_fixed_s": 0}
    waits = {"to_training_s": 0, "to_sampling_s": 0, "max_running_requests": 512, "num_steps": 2}
    one = Scenario.model_validate(sizes | rates | waits | {"gpus": 1})
    assert simulated(one) / simulated(one.but(gpus=2)) == pytest.approx(1.68, abs=0.005)


def test_the_preset_of_the_results_takes_the_estimated_seconds() -> None:
    work = PlannedStep(group_size=5, prompt_tokens=150, output_tokens=300, rank=32)
    assert plan_machine("1xH100", "qwen2.5-0.5b", work).best[0].step_s == pytest.approx(5.5, abs=0.05)


def test_without_staleness_engine_and_trainer_take_turns() -> None:
    assert not any(c.is_split for c in on(4, work=PlannedStep(max_staleness=0)))
    assert {c.scenario.max_staleness for c in on(4, work=PlannedStep(max_staleness=3)) if c.is_split} == {3}


def test_the_best_are_in_order_and_share_the_gpus_in_different_ways() -> None:
    found = plan_machine("8xH100", "qwen2.5-7b", PlannedStep())
    seconds = [each.step_s for each in found.best]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    ways = {(each.candidate.engine_gpus, each.candidate.trainer_gpus, each.candidate.is_split) for each in found.best}
    assert len(ways) == 3
    assert found.on_policy and not found.on_policy.candidate.is_split and found.on_policy.step_s >= seconds[0]


def test_experts_that_are_shared_are_on_one_gpu_with_micro_batches_that_fit_beside_the_engine() -> None:
    given = Given.of(SMALL)
    shared = given._replace(trainer=given.trainer.but(share_experts=True))
    model = model_of("qwen3-30b-a3b")
    found = list(candidates(2, "H200", model, SMALL, ROUND, shared))
    assert {(c.engine_gpus, c.trainer_gpus, c.is_split, c.engine.colocation) for c in found} == {(1, 1, False, "keep_weights")}


def test_adapters_on_experts_take_longer_to_hand_over_as_was_measured() -> None:
    model, given = model_of("qwen3-30b-a3b"), Given.of(SMALL)

    def hand_over(**lora: Any) -> tuple[float, float]:
        trainer = given.trainer.but(share_experts=True, lora=LoraConfig(rank=8, **lora))
        found = next(iter(candidates(1, "H200", model, SMALL, ROUND, given._replace(trainer=trainer))))
        return found.scenario.to_training_s, found.scenario.to_sampling_s

    assert hand_over() == pytest.approx((1.9, 7.8), rel=0.03)  # docs/results/speed.md, in a run
    assert hand_over(target_modules=("q_proj", "k_proj", "v_proj", "o_proj")) == (0.4, 0.79)


def test_its_options_are_a_configuration() -> None:
    work = PlannedStep()
    for each in plan_machine("8xH100", "qwen2.5-7b", work).best:
        config = changed(RunConfig(), [f"{name}={value}" for name, value in plan_words.options(each, work).items()])
        assert config.engine.replicas == each.candidate.engine.replicas
        assert config.trainer.num_processes == each.candidate.trainer_gpus
        assert config.trainer.loss.correction.max_staleness == each.candidate.scenario.max_staleness


def test_own_gpus_are_named_once_each() -> None:
    first = plan_machine("8xH100", "qwen2.5-7b", PlannedStep()).best[0]
    assert plan_words.environment(first) == "RATCHET_ENGINE_GPUS='[0,1,2,3]' RATCHET_TRAINER_GPUS='[4,5,6,7]'"


def test_rates_are_measured_or_say_that_they_are_estimates() -> None:
    assert rates_of(SEVEN, "H200").source.startswith("measured")
    assert rates_of(SEVEN, "A100").source.startswith("estimated")
    small = model_of("qwen2.5-0.5b")
    assert rates_of(small, "H200").engine_tokens_per_s == pytest.approx(37600 * 4.8 / 3.35)
    between = rates_of(model_of("qwen2.5-1.5b"), "H100").trainer_rows_per_s
    assert rates_of(SEVEN, "H100").trainer_rows_per_s < between < rates_of(small, "H100").trainer_rows_per_s


@pytest.mark.parametrize(
    ("text", "said"),
    [("8xV100", "'V100' is not known; known are H200, H100"), ("9xH100", "1 to 8"), ("0xH100", "1 to 8"), ("H100", "1 to 8")],
)
def test_gpus_that_cannot_be_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        gpus_in(text)
    assert text in str(refused.value) and "\n" not in str(refused.value)
