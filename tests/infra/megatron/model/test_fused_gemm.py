"""quack's kernel for experts: where it computes, and what its check finds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.megatron.model import kernel_packages
from infra.megatron.model.experts import fused_gemm, grouped_gemm
from infra.megatron.model.kernel_packages import UnusableKernel

CPU = torch.device("cpu")


def exact(x: Tensor, weight: Tensor, added: Tensor, *, out: Tensor, cu_seqlens_m: Tensor, tuned: bool) -> Tensor:
    """What quack has to compute, with its arguments."""
    assert not tuned and cu_seqlens_m.dtype is torch.int32
    rows = torch.split(x.float(), cu_seqlens_m.diff().tolist())
    return out.copy_(added.float() + torch.cat([part @ matrix.float() for part, matrix in zip(rows, weight, strict=True)]))


def check(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(fused_gemm, "_gemm_add", lambda: function)
    monkeypatch.setattr(fused_gemm, "computes", lambda *_: True)
    monkeypatch.setattr(kernel_packages, "version", lambda package: "0.6.5")
    fused_gemm.check(CPU, torch.bfloat16, 48, 64)


def test_it_computes_in_bfloat16_on_a_gpu_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, half = torch.device("cuda"), torch.bfloat16
    for function in (exact, None):
        monkeypatch.setattr(fused_gemm, "_gemm_add", lambda function=function: function)
        assert fused_gemm.computes(gpu, half, 16, 24) is (function is exact)
        others = [(CPU, half, 16, 24), (gpu, torch.float32, 16, 24), (gpu, half, 12, 24), (gpu, half, 16, 20)]
        assert not any(fused_gemm.computes(*other) for other in others)


def test_the_record_says_what_computed_the_experts(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("qwen3-moe").result.backends["experts_backend"] == "torch, one expert after the other"
    assert "experts_backend" not in train("qwen3").result.backends
    monkeypatch.setattr(fused_gemm, "_gemm_add", lambda: exact)
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda: True)
    gpu, half = torch.device("cuda"), torch.bfloat16
    experts = SimpleNamespace(ffn_size=24)
    assert grouped_gemm.described(gpu, half, experts, 64) == "quack-kernels forward, torch grouped_mm backward"  # type: ignore[arg-type]
    assert grouped_gemm.described(gpu, half, experts, 60) == "torch grouped_mm"  # type: ignore[arg-type]


def test_the_right_function_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, exact)


def test_without_the_package_nothing_is_compared() -> None:
    fused_gemm.check(CPU, torch.bfloat16, 48, 64)


def forgets_the_sum(*inputs: Tensor, **options: Any) -> Tensor:
    return exact(*inputs[:2], torch.zeros_like(inputs[2]), **options)


def takes_the_next_expert(x: Tensor, weight: Tensor, added: Tensor, **options: Any) -> Tensor:
    return exact(x, weight.roll(1, 0), added, **options)


def has_a_row_without_numbers(x: Tensor, weight: Tensor, added: Tensor, **options: Any) -> Tensor:
    x = x.clone()
    x[4] = torch.nan
    return exact(x, weight, added, **options)


@pytest.mark.parametrize("wrong", [forgets_the_sum, takes_the_next_expert, has_a_row_without_numbers])
def test_a_wrong_function_is_found(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"^quack-kernels 0\.6\.5 computes the experts' products wrong on this GPU: the sum is "
    with pytest.raises(UnusableKernel, match=said):
        check(monkeypatch, wrong)
