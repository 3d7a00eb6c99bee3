"""What makes the trainer fast on a GPU gives the numbers of what it replaces, and its speed is counted right."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from infra.config import LoraConfig
from infra.machine import devices
from infra.megatron.checkpoint import pinned_memory
from infra.megatron.checkpoint.pinned_memory import HostCopy
from infra.megatron.lora import layers as lora
from infra.megatron.loss.batch import Batch
from infra.megatron.model import cpu_patches, parallel
from infra.megatron.model.build import build
from infra.megatron.model.rotary import Packed, Rotary, rotate
from infra.megatron.program import throughput
from infra.models import architecture

KERNELS = """
import torch
from types import SimpleNamespace
from infra.megatron.model import kernels
from infra.megatron.model.norms_and_activation import HeadNorm, SwiGLU
from infra.megatron.loss.logprobs import token_logprobs
from infra.megatron.model.experts import fused_gemm, grouped_gemm
from infra.megatron.model.experts.grouped_gemm import Adapters, experts_output, route
from infra.megatron.model.copies import copies_of, gather
from infra.megatron.model.rotary import Packed, Rotary, rotate

def add_products(y, x, weight, bounds):
    parts = zip(x.float().split(bounds.diff().tolist()), weight.float(), strict=True)
    return y.copy_(y + torch.cat([rows @ matrix for rows, matrix in parts]))

fused_gemm.add_products = add_products
torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
    x, up = torch.randn(5, 1, 2 * 1500, dtype=dtype), torch.randn(5, 1, 1500, dtype=dtype)
    logits, targets, upstream = (3 * torch.randn(17, 5000)).to(dtype), torch.randint(0, 5000, (17,)), torch.randn(17)
    heads = torch.randn(9, 3, 3 * 48, dtype=dtype)[..., 48:96]
    packed = Packed(**dict(zip(("cos", "sin"), Rotary(48, 1e6, dtype, torch.device("cpu"))(torch.arange(9)), strict=True)))
    norm = HeadNorm(SimpleNamespace(params_dtype=dtype), 48, 1e-6).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    path = route(torch.tensor([[4, 1], [1, 2], [4, 2]]), 6)
    weights = [torch.randn(6, *size).mul(0.1).to(dtype) for size in ((64, 48), (48, 32), (8, 48), (64, 8), (8, 32), (48, 8))]
    hidden, shares = torch.randn(3, 48).to(dtype), torch.rand(6)
    # Of several tiles, one of which has rows of four experts; one expert has none.
    many, narrow, matrices, tokens = (torch.randn(*size).to(dtype) for size in ((142, 130), (142, 8), (5, 130, 8), (71, 130)))
    frozen = torch.randn(5, 8, 130).mul(0.1).to(dtype)
    tiles = route(torch.tensor([0] * 5 + [2] * 70 + [3] * 3 + [4] * 64).view(71, 2), 5)
    found = []
    for kernels._found in (True, False):
        x_leaf, logits_leaf, heads_leaf = (tensor.clone().requires_grad_() for tensor in (x, logits, heads))
        assert kernels.usable(x) is kernels._found
        y = SwiGLU()(x_leaf)
        logprobs, entropies = token_logprobs(logits_leaf, targets, temperature=0.7, group=None)
        y.backward(up)
        logprobs.backward(upstream)
        rotated = rotate(heads_leaf, packed)
        rotated.backward(heads.flip(0))
        fused = torch.cat((heads, heads), 1).unsqueeze(1).clone().requires_grad_()
        normed = norm(fused[:, :, 1:4])  # heads that do not lie beside each other
        normed.backward(heads.flip(0).unsqueeze(1))
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, shares, *weights[2:])]
        mixed = experts_output(*leaves[:2], path, *weights[:2], Adapters(leaves[2:4], leaves[4:], 2.0))
        mixed.backward(hidden.flip(0))
        of_experts = [mixed, *(leaf.grad for leaf in leaves)]
        rows = x[:, 0].clone().requires_grad_()
        gather(rows, copies_of(torch.tensor([2, 0, 2, 4, 0, 2]), 5)).backward(x[[0, 1, 2, 3, 4, 0], 0])
        of_experts.append(rows.grad)
        for each in (matrices, matrices.mT.contiguous().mT):
            for fused_gemm.computes in (lambda *_: False, lambda *_: True):
                of_experts.append(grouped_gemm.with_adapter(narrow, frozen, narrow, each.mT, tiles))
            of_experts.append(grouped_gemm.narrow_by_expert(many, each, tiles, 0.5))
            of_experts.append(grouped_gemm.narrow_by_expert(tokens, each, tiles, 0.5, of_tokens=True))
        for is_of_tokens, wide in ((False, many), (True, tokens)):
            of_experts.append(grouped_gemm.to_first(narrow, wide, tiles, of_tokens=is_of_tokens))
            of_experts.append(grouped_gemm.to_second(wide, narrow, tiles, of_tokens=is_of_tokens))
        found.append([rotated, heads_leaf.grad, normed, fused.grad, y, x_leaf.grad, logprobs, entropies, logits_leaf.grad, *of_experts])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
"""


@pytest.fixture
def started(new_job: Callable[..., Any]) -> Any:
    yield parallel.start(new_job().job)
    parallel.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_rotated_as_megatron_core_does_it_sequence_by_sequence(
    dtype: torch.dtype, started: parallel.ParallelContext
) -> None:
    cpu_patches.install()
    lengths, head_dim, theta = [7, 1, 30, 12], 32, 1e6
    x = torch.randn(sum(lengths), 3, head_dim).to(dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    rotary = RotaryEmbedding(head_dim, 1.0, rotary_base=theta, use_cpu_initialization=True)

    class Config:
        apply_rope_fusion, rotary_interleaved, multi_latent_attention = False, False, False

    expected = apply_rotary_pos_emb(x, rotary(max(lengths)), Config, starts, cp_group=rotary.cp_group)
    positions = torch.cat([torch.arange(length) for length in lengths])
    cos, sin = Rotary(head_dim, theta, dtype, torch.device("cpu"))(positions)
    assert torch.equal(rotate(x, Packed(cos=cos, sin=sin)), expected)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA")
def test_kernels_compute_what_plain_pytorch_does(child_environment: dict[str, str]) -> None:
    environment = child_environment | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", KERNELS], env=environment, check=True)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj")])
def test_adapters_on_some_projections_leave_the_others_alone(
    targets: tuple[str, ...], train: Callable[..., Any], new_job: Callable[..., Any]
) -> None:
    made = train("qwen3", lora={"target_modules": targets})
    assert {name.split(".")[-3] for name in made.adapter} == set(targets)
    assert all(float(value.abs().max()) > 0 for value in made.adapter.values())


def test_flops_are_counted_as_on_paper(model: Callable[[str], Path]) -> None:
    a = architecture.read_architecture(model("qwen2"))
    # Layers: q, o 64x64; k, v 64x32; gate, up, down 64x128. Two of them.
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    adapters = 2 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    attention = 2 * sum(4 * 64 * n * n / 2 for n in (100, 50))
    work = throughput.Computed(num_rows=150, num_logits=120, num_attended=(100**2 + 50**2) / 2)
    expected = (4 * linear + 6 * adapters) * 150 + 4 * 64 * 512 * 120 + 3.5 * attention
    assert throughput.step_flops(a, LoraConfig(), work) == expected


def test_a_prompt_is_counted_once_for_its_group() -> None:
    """A prompt of 3 tokens with answers of 2 and 4, whose last tokens are not read."""
    tokens = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9])
    is_loss = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]).bool()
    batch = Batch(0, "base", 1.0, tokens, [0, 5, 12], is_loss, torch.zeros(12), torch.zeros(12), groups=[4, 4])
    assert throughput.work_of(batch, [0, 1]) == throughput.Computed(4 + 3, 6, (4**2 + 6**2 - 3**2) / 2)
    assert throughput.work_of(dataclasses.replace(batch, groups=None), [0, 1]) == throughput.Computed(4 + 6, 6, (4**2 + 6**2) / 2)


def test_a_token_counts_only_the_experts_it_is_sent_to(model: Callable[[str], Path]) -> None:
    a = architecture.read_architecture(model("qwen3-moe"))
    assert a.experts is not None
    attention = 2 * (2 * 64 * 128 + 2 * 64 * 64)
    linear = 2 * (2 * 3 * 64 * 32 + 64 * 8) + attention
    lora_free = LoraConfig(target_modules=("q_proj",), rank=1)
    adapters = 2 * (64 + 128)
    counted = throughput.step_flops(a, lora_free, throughput.Computed(num_rows=10, num_logits=0, num_attended=0))
    assert counted == (4 * linear + 6 * adapters) * 10


@pytest.mark.parametrize(("gpu", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Tesla T4", None)])
def test_mfu_needs_a_gpu_whose_peak_is_known(gpu: str, peak: float | None) -> None:
    assert devices.peak_flops(gpu) == peak


def test_on_a_cpu_there_is_no_mfu(train: Callable[..., Any]) -> None:
    metrics = train().result.metrics
    assert "train/mfu" not in metrics
    assert metrics["train/tokens_per_s"] > 0


def test_detached_adapters_leave_the_model_as_it_was(
    started: parallel.ParallelContext, new_job: Callable[..., Any], model: Callable[[str], Path]
) -> None:

    job = new_job("qwen3").job
    a = architecture.read_architecture(model("qwen3"))
    net = build(a, job.trainer, started)
    before = [name for name, _ in net.named_parameters()]
    lora.attach(net, a, job.trainer.lora, started, sequence_parallel=False)
    assert len(list(net.named_parameters())) > len(before)
    lora.detach(net)
    assert [name for name, _ in net.named_parameters()] == before


class PageLockingHost:
    """CUDA's runtime as far as it is asked for, where there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: list[tuple[int, int]] = []
        for name in ("set_device", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.locked.append((address, num_bytes))
        return 0


@pytest.mark.parametrize("available_gib", [1000, 8])
def test_weights_come_back_from_the_host_as_they_were(available_gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    locking = PageLockingHost(monkeypatch)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available_gib * 2**30))
    net = torch.nn.Sequential(torch.nn.Linear(33, 50), torch.nn.Linear(50, 2).bfloat16()).requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    copy = HostCopy(net)
    for _ in range(2):
        copy.take()
        copy.drop()
        assert sum(parameter.numel() for parameter in net.parameters()) == 0
        # Without room on the host the weights have to be read again.
        assert copy.give_back() == (available_gib == 1000)
        assert {name: value.shape for name, value in net.state_dict().items()} == {n: v.shape for n, v in before.items()}
    if available_gib == 1000:
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert len(locking.locked) == 4
        assert all(address % 4096 == num_bytes % 4096 == 0 for address, num_bytes in locking.locked)


@pytest.mark.parametrize(("share_free", "is_wanted", "is_copied"), [(1.6, True, True), (1.4, True, False), (100, False, False)])
def test_the_copy_on_the_host_leaves_half_its_size_free_and_is_made_only_if_wanted(
    share_free: float, is_wanted: bool, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    PageLockingHost(monkeypatch)
    net = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    free = pinned_memory.SPARE_BYTES + int(share_free * 4 * 2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    copy = HostCopy(net, is_wanted=is_wanted)
    copy.take()
    copy.drop()
    assert copy.give_back() is is_copied
