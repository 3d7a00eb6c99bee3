"""However the work is spread, the numbers are those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

TWO = {"num_processes": 2}
DENSE = {
    "data parallel": TWO,
    "data parallel, small micro-batches": TWO | {"max_tokens_per_microbatch": 45},
    "tensor parallel": TWO | {"tensor_parallel": 2},
    "sequence parallel": TWO | {"tensor_parallel": 2, "sequence_parallel": True},
    "sequence parallel, recomputed": TWO | {"tensor_parallel": 2, "sequence_parallel": True, "recompute": True},
}
EXPERTS = {
    "expert parallel": TWO | {"expert_parallel": 2},
    "expert parallel, small micro-batches": TWO | {"expert_parallel": 2, "max_tokens_per_microbatch": 45},
    "data parallel": TWO,
    "sequence parallel": TWO | {"tensor_parallel": 2, "sequence_parallel": True},
    "sequence and expert parallel": TWO | {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
}


@pytest.fixture(scope="session")
def alone(train: Callable[..., Any]) -> dict[str, Any]:
    """What one process makes of the same batch."""
    return {name: train(name) for name in ("qwen3", "qwen2", "qwen3-moe")}


@pytest.fixture(scope="session")
def spread(
    new_job: Callable[..., Any], train_on_two: Callable[..., None], make_batch: Callable[..., Any]
) -> dict[tuple[str, str], Any]:
    runs = {("qwen3", name): new_job(**layout) for name, layout in DENSE.items()}
    runs |= {("qwen3-moe", name): new_job("qwen3-moe", **layout) for name, layout in EXPERTS.items()}
    runs["qwen2", "tensor parallel"] = new_job("qwen2", **DENSE["tensor parallel"])
    for name in ("qwen3", "qwen3-moe"):
        layout = EXPERTS["expert parallel"] if name == "qwen3-moe" else TWO
        runs[name, "one sequence"] = new_job(name, batch=make_batch(num_sequences=1), **layout)
    train_on_two(list(runs.values()))
    return runs


@pytest.fixture(scope="session")
def resumed(new_job: Callable[..., Any], train_on_two: Callable[..., None], spread: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The second step, in another layout than the first's."""
    dense = new_job(after=spread["qwen3", "data parallel"], **DENSE["tensor parallel"])
    experts = new_job("qwen3-moe", after=spread["qwen3-moe", "sequence parallel"], **EXPERTS["expert parallel"])
    train_on_two([dense, experts])
    return {"qwen3": dense, "qwen3-moe": experts}


def assert_same(run: Any, expected: Any) -> None:
    assert run.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-7)
    assert run.canary.base_logprobs == pytest.approx(expected.canary.base_logprobs, abs=2e-5)
    assert run.canary.adapter_logprobs == pytest.approx(expected.canary.adapter_logprobs, abs=1e-3)
    assert_close(run.moments, expected.moments, 1e-6)
    # Adam divides each gradient by its own size, so the float noise of a gradient near zero shows in full: 1e-2 is one step.
    assert_close(run.adapter, expected.adapter, 1e-3)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < tolerance


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_learns_the_same_under_every_layout(
    name: str, alone: dict[str, Any], spread: dict[tuple[str, str], Any]
) -> None:
    assert_same(spread["qwen3", name], alone["qwen3"])


@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_of_experts_learns_the_same_under_every_layout(
    name: str, alone: dict[str, Any], spread: dict[tuple[str, str], Any]
) -> None:
    assert_same(spread["qwen3-moe", name], alone["qwen3-moe"])


def test_tensor_and_data_parallel_together_learn_the_same(
    new_job: Callable[..., Any], train_on_four: Callable[..., None], alone: dict[str, Any]
) -> None:
    sequence = {"num_processes": 4, "tensor_parallel": 2, "sequence_parallel": True}
    runs = {
        "qwen3": new_job(num_processes=4, tensor_parallel=2),
        "qwen3-moe": new_job("qwen3-moe", expert_parallel=4, **sequence),
    }
    train_on_four(list(runs.values()))
    for name, run in runs.items():
        assert_same(run, alone[name])


def test_biases_are_cut_by_tensor_parallelism(alone: dict[str, Any], spread: dict[tuple[str, str], Any]) -> None:
    assert_same(spread["qwen2", "tensor parallel"], alone["qwen2"])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_a_rank_without_sequences_takes_part(
    name: str, train: Callable[..., Any], spread: dict[tuple[str, str], Any], make_batch: Callable[..., Any]
) -> None:
    assert_same(spread[name, "one sequence"], train(name, batch=make_batch(num_sequences=1)))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_a_run_goes_on_under_another_layout(
    name: str, alone: dict[str, Any], resumed: dict[str, Any], train: Callable[..., Any]
) -> None:
    second = train(name, after=alone[name])
    run = resumed[name]
    assert run.result.adapter_version == 2
    assert run.metrics == pytest.approx(second.metrics, rel=1e-3, abs=1e-5)
    assert_close(run.adapter, second.adapter, 1e-3)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_number_of_micro_batches_does_not_show(aggregation: str, train: Callable[..., Any]) -> None:
    assert_same(train(loss={"aggregation": aggregation}, max_tokens_per_microbatch=45), train(loss={"aggregation": aggregation}))


def test_recomputation_does_not_show(train: Callable[..., Any], alone: dict[str, Any]) -> None:
    again = train(recompute=True)
    assert_same(again, alone["qwen3"])
    assert all(
        float(moment.abs().max()) > 0
        for name, moment in again.moments.items()
        if name.startswith("exp_avg.") and "lora_B" in name
    )


def test_a_bfloat16_base_learns_nearly_the_same_in_float32_adapters(train: Callable[..., Any], alone: dict[str, Any]) -> None:
    rough = train(dtype="bfloat16")
    assert rough.metrics["train/loss"] == pytest.approx(alone["qwen3"].metrics["train/loss"], abs=0.02)
    assert rough.metrics["train/grad_norm"] == pytest.approx(alone["qwen3"].metrics["train/grad_norm"], rel=0.05)
    assert rough.metrics != alone["qwen3"].metrics
    assert {tensor.dtype for tensor in rough.adapter.values()} == {torch.float32}


def test_the_same_job_twice_gives_the_same_bytes(train: Callable[..., Any], alone: dict[str, Any]) -> None:
    first, second = alone["qwen3-moe"], train("qwen3-moe")
    for path in sorted(path for path in first.job.output_dir.rglob("*") if path.is_file()):
        assert path.read_bytes() == (second.job.output_dir / path.relative_to(first.job.output_dir)).read_bytes(), path.name


def test_another_seed_gives_another_start(train: Callable[..., Any], alone: dict[str, Any]) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(train(job={"seed": 1}).adapter[name], alone["qwen3"].adapter[name])
