"""Experts in a few large products: the numbers of one expert after the other, whoever is idle."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.config import LoraConfig
from infra.megatron.lora import layers as lora
from infra.megatron.model import base_weights, parallel
from infra.megatron.model.build import build
from infra.megatron.model.experts import grouped_gemm
from infra.megatron.model.experts.grouped_gemm import Adapters
from infra.megatron.model.experts.layer import ExpertAdapters, _RouterLogits
from infra.models import architecture

T, E, K, H, FFN = 40, 6, 2, 16, 24
CHOICES = {
    "all experts": torch.stack([torch.arange(T) % E, (torch.arange(T) + 1) % E], 1),
    "some idle": torch.tensor([[4, 1]]).expand(T, K),
    "one token": torch.tensor([[5, 0]]),
    "no token": torch.zeros(0, K, dtype=torch.int64),
}
SCALE = 0.5


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) / 4


def leaves_of(experts_TK: Tensor, rank: int) -> list[Tensor]:
    """x, shares, and A and B of both layers."""
    sizes = [(len(experts_TK), H), (len(experts_TK), K), (E, rank, H), (E, 2 * FFN, rank), (E, rank, FFN), (E, H, rank)]
    return [normal(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]


GATE_UP, DOWN = normal(E, 2 * FFN, H, seed=10), normal(E, H, FFN, seed=11)


def one_after_the_other(experts_TK: Tensor, leaves: list[Tensor]) -> Tensor:
    """As on paper: token by token, expert by expert."""
    x, share, a1, b1, a2, b2 = leaves
    outputs = []
    for t in range(len(x)):
        total = x.new_zeros(H)
        for k, e in enumerate(experts_TK[t].tolist()):
            inner = (GATE_UP[e] + SCALE * b1[e] @ a1[e]) @ x[t]
            total = total + share[t, k] * ((DOWN[e] + SCALE * b2[e] @ a2[e]) @ (F.silu(inner[:FFN]) * inner[FFN:]))
        outputs.append(total)
    return torch.stack(outputs) if outputs else x.sum(1, keepdim=True).expand(0, H)


def all_at_once(experts_TK: Tensor, leaves: list[Tensor]) -> Tensor:
    x, share, a1, b1, a2, b2 = leaves
    path = grouped_gemm.route(experts_TK, E)
    share_N = share.flatten().gather(0, path.order_N)
    return grouped_gemm.experts_output(x, share_N, path, GATE_UP, DOWN, Adapters((a1, b1), (a2, b2), SCALE))


@pytest.mark.parametrize("uses_torchs_own", [False, True], ids=["product for each", "grouped product"])
@pytest.mark.parametrize("choice", CHOICES)
def test_output_and_gradients_are_those_of_one_expert_after_the_other(
    choice: str, uses_torchs_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if uses_torchs_own:  # on a CPU it is slow, but takes the same tensors
        monkeypatch.setattr(grouped_gemm, "_is_grouped", lambda x, width: len(x) > 0)
    found, expected = ([leaf.detach().requires_grad_() for leaf in leaves_of(CHOICES[choice], 8)] for _ in range(2))
    output, reference = all_at_once(CHOICES[choice], found), one_after_the_other(CHOICES[choice], expected)
    torch.testing.assert_close(output, reference)
    for result in (output, reference):
        (result * normal(len(CHOICES[choice]), H, seed=20)).sum().backward()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, torch.zeros_like(other) if other.grad is None else other.grad)


def test_an_expert_without_rows_has_no_gradient_whatever_the_kernel_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm, "_is_grouped", lambda x, width: True)
    monkeypatch.setattr(grouped_gemm.F, "grouped_mm", lambda a, b, offs: torch.full((3, a.shape[0], b.shape[1]), torch.nan))
    sums = grouped_gemm.over_rows(torch.ones(4, 8), torch.ones(4, 16), torch.tensor([0, 4, 4], dtype=torch.int32))
    assert sums[0].eq(0).all()
    assert sums[1].isnan().all()
    assert sums[2].eq(0).all()


def test_rows_are_sorted_by_expert_and_find_their_way_back() -> None:
    experts_TK = torch.tensor([[3, 0], [0, 5], [3, 5]])
    path = grouped_gemm.route(experts_TK, 6)
    assert path.source_N.tolist() == [0, 1, 0, 2, 1, 2]
    assert path.ends_E.tolist() == [2, 2, 2, 4, 4, 6]
    assert path.ends_E.dtype is torch.int32
    for expert, (start, end) in enumerate(pairwise([0, *path.ends_E.tolist()])):
        assert set(experts_TK.flatten()[path.order_N[start:end]].tolist()) <= {expert}
    x = torch.randn(3, 7)
    torch.testing.assert_close(grouped_gemm.combine(x[path.source_N], path.inverse_TK), 2 * x)


@pytest.fixture
def started(new_job: Callable[..., Any]) -> Any:
    yield parallel.start(new_job().job)
    parallel.stop()


@pytest.mark.parametrize(
    "targets", [("gate_proj", "up_proj"), ("gate_proj",), ("up_proj", "down_proj"), ("down_proj",), ("q_proj",)]
)
@pytest.mark.parametrize("rank", [3, 8])
def test_adapters_of_some_projections_are_filled_up_for_the_kernels(
    targets: tuple[str, ...], rank: int, started: parallel.ParallelContext, new_job: Callable[..., Any]
) -> None:
    job = new_job("qwen3-moe").job
    a = architecture.read_architecture(job.model_path)
    experts = build(a, job.trainer, started).get_submodule("decoder.layers.0.mlp.experts")
    adapters = ExpertAdapters(experts, LoraConfig(rank=rank, target_modules=targets))  # type: ignore[arg-type]
    for parameters in (adapters.lora_A, adapters.lora_B):
        for i, value in enumerate(parameters.values()):
            value.data = normal(*value.shape, seed=i)
    first, second, _ = adapters.fused(torch.float32)
    rows = {}
    if first:
        rows["gate_proj"], rows["up_proj"] = (first[1] @ first[0]).chunk(2, 1)
    if second:
        rows["down_proj"] = second[1] @ second[0]
    assert all(pair is None or pair[0].shape[1] % 8 == pair[1].shape[2] % 8 == 0 for pair in (first, second))
    for name, update in rows.items():
        expected = adapters.lora_B[name] @ adapters.lora_A[name] if name in targets else torch.zeros(())
        torch.testing.assert_close(update, expected.expand_as(update))
    assert set(adapters.lora_A) == set(targets) & {"gate_proj", "up_proj", "down_proj"}


def test_experts_are_read_one_by_one_and_said(
    started: parallel.ParallelContext,
    new_job: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base_weights, "PROGRESS_S", -1.0)
    job = new_job("qwen3-moe").job
    a = architecture.read_architecture(job.model_path)
    net = build(a, job.trainer, started)
    with caplog.at_level("INFO"):
        base_weights.load_base(net, job.model_path, a, started)
    assert caplog.messages[-1].startswith("loaded 0.0 of 0.0 GiB")
    experts = net.get_submodule("decoder.layers.1.mlp.experts")
    with base_weights.Checkpoint(job.model_path) as checkpoint:
        for e in range(8):
            name = f"model.layers.1.mlp.experts.{e}."
            gate, up, down = (checkpoint[f"{name}{x}_proj.weight"][:] for x in ("gate", "up", "down"))
            assert torch.equal(experts.gate_up[e], torch.cat((gate, up)))  # type: ignore[index]
            assert torch.equal(experts.down[e], down)  # type: ignore[index]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.3.up_proj.weight", "lm_head.weight"])
def test_a_base_model_with_a_number_that_is_not_finite_is_named(
    started: parallel.ParallelContext, new_job: Callable[..., Any], tmp_path: Path, name: str, wrong: float
) -> None:
    job = new_job("qwen3-moe").job
    folder = Path(shutil.copytree(job.model_path, tmp_path / "model"))
    path = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][5, 3] = wrong
    save_file(tensors, path)
    a = architecture.read_architecture(folder)
    with pytest.raises(base_weights.UnusableBase, match=f"the base model in {folder} holds NaN or infinite numbers"):
        base_weights.load_base(build(a, job.trainer, started), folder, a, started)


def test_each_expert_has_adapters_of_its_own_by_its_hugging_face_name(train: Callable[..., Any]) -> None:
    made = train("qwen3-moe", lora={"rank": 2, "target_modules": ["up_proj"]})
    names = [
        f"base_model.model.model.layers.{i}.mlp.experts.{e}.up_proj.lora_{m}.weight"
        for i in (0, 1)
        for e in range(8)
        for m in "AB"
    ]
    assert sorted(made.adapter) == sorted(names)
    assert {tuple(made.adapter[name].shape) for name in names if "lora_A" in name} == {(2, 64)}
    assert len({made.adapter[name].sum().item() for name in names}) == len(names)


def test_a_layer_whose_adapters_are_off_is_the_frozen_one(started: parallel.ParallelContext, new_job: Callable[..., Any]) -> None:
    job = new_job("qwen3-moe").job
    a = architecture.read_architecture(job.model_path)
    net = build(a, job.trainer, started)
    base_weights.load_base(net, job.model_path, a, started)
    layer, hidden = net.get_submodule("decoder.layers.0.mlp"), torch.randn(9, 1, 64)
    before = layer(hidden)[0]
    shards = lora.attach(net, a, job.trainer.lora, started, sequence_parallel=False)
    for shard in shards:
        torch.nn.init.normal_(shard.parameter)
    assert not torch.equal(layer(hidden)[0], before)
    lora.set_enabled(net, False)
    assert torch.equal(layer(hidden)[0], before)
    lora.set_enabled(net, True)
    lora.detach(net)
    assert torch.equal(layer(hidden)[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("targets", [("gate_proj", "up_proj", "down_proj"), ("up_proj", "q_proj"), ("down_proj",)])
def test_gradients_of_experts_adapters_are_summed_and_arrive_at_the_end(
    targets: tuple[str, ...], dtype: torch.dtype, started: parallel.ParallelContext, new_job: Callable[..., Any]
) -> None:
    job = new_job("qwen3-moe").job
    a = architecture.read_architecture(job.model_path)
    net = build(a, job.trainer, started)
    base_weights.load_base(net, job.model_path, a, started)
    shards = lora.attach(net, a, LoraConfig(target_modules=targets), started, sequence_parallel=False)  # type: ignore[arg-type]
    parameters = [shard.parameter for shard in shards if shard.is_expert and ".layers.0." in shard.name]
    for i, parameter in enumerate(parameters):
        parameter.data = normal(*parameter.shape, seed=i)
    net.to(dtype)  # after the adapters were attached
    layer, microbatches = net.get_submodule("decoder.layers.0.mlp"), [normal(9, 1, 64, seed=i).to(dtype) for i in range(3)]

    def backward() -> None:
        for hidden in microbatches:
            layer(hidden)[0].square().sum().backward()

    backward()
    expected = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with lora.gradients_summed(net):
        backward()
        assert all(parameter.grad is None for parameter in parameters)
    torch.testing.assert_close([parameter.grad for parameter in parameters], expected, rtol=1e-6, atol=1e-7)
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in parameters if parameter.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_decides_in_float32_and_its_gradient_is_that_of_the_widened_product(dtype: torch.dtype) -> None:
    x, weight, upstream = normal(T, H, seed=0).to(dtype), normal(E, H, seed=1).to(dtype), normal(T, E, seed=2)
    found = []
    for way in (_RouterLogits.apply, lambda x, weight: F.linear(x.float(), weight.float())):
        leaf = x.clone().requires_grad_()
        logits = way(leaf, weight)
        assert logits.dtype is torch.float32
        logits.backward(upstream)
        found.append((logits.detach(), leaf.grad))
    (mine, mine_x), (expected, expected_x) = found
    assert torch.equal(mine, expected)
    torch.testing.assert_close(mine_x, expected_x, **{} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 5e-3})
