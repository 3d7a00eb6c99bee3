"""Which function computes attention, and how flash-attn-4 is checked before the first step."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.megatron.model import attention, kernel_packages
from infra.megatron.model.attention import FLASH_4, ONE_BY_ONE, VARLEN
from infra.megatron.model.kernel_packages import UnusableKernel

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """What is installed is looked up once in a process."""
    attention._flash_4.cache_clear()
    yield
    attention._flash_4.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None, *, capability: int = 9) -> None:
    """A package flash-attn-4 with this function; None: one that does not load."""
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.__path__ = []
    for module in (package, cute):
        module.__spec__ = SimpleNamespace(name=module.__name__)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if function:
        cute.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(kernel_packages, "version", lambda package: "4.0.0")


def exact(query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, causal: bool, **where: Any) -> tuple[Tensor, None]:
    """What flash-attn-4 has to compute, with its arguments."""
    assert causal
    packed = SimpleNamespace(cu_seqlens_q=where["cu_seqlens_q"], cu_seqlens_kv=where["cu_seqlens_k"])
    return attention.one_by_one(query, key, value, packed, softmax_scale), None


def check(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    install(monkeypatch, function)
    monkeypatch.setattr(attention, "backend", lambda *_: FLASH_4)
    attention.check(CPU, torch.bfloat16, 4, 2, 64)


def test_a_flash_kernel_needs_a_gpu_and_half_precision() -> None:
    assert attention.backend(CPU, torch.bfloat16, 64) == attention.backend(GPU, torch.float32, 64) == ONE_BY_ONE


@pytest.mark.parametrize(
    ("capability", "head_dim", "expected"),
    [(9, 64, FLASH_4), (9, 128, FLASH_4), (9, 96, VARLEN), (8, 64, VARLEN), (10, 64, VARLEN)],
)
def test_flash_attn_4_computes_where_it_was_measured(
    capability: int, head_dim: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, exact, capability=capability)
    assert attention.backend(GPU, torch.bfloat16, head_dim) == expected
    assert attention.backend(GPU, torch.bfloat16, head_dim, 8191) == VARLEN
    said = "flash-attn-4 from 8192 rows, torch varlen_attn below" if expected == FLASH_4 else VARLEN
    assert attention.described(GPU, torch.bfloat16, head_dim) == said


def test_the_rows_of_a_micro_batch_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def backend(*about: object) -> str:
        asked.append(about)
        return ONE_BY_ONE

    monkeypatch.setattr(attention, "backend", backend)
    monkeypatch.setattr(attention, "rotate", lambda rows, packed: rows)
    bounds = torch.tensor([0, 2, 5])
    packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, copies=None)
    layer = attention.PackedAttention(SimpleNamespace(kv_channels=64))
    layer(torch.randn(5, 2, 64), torch.randn(5, 1, 64), torch.randn(5, 1, 64), None, packed_seq_params=packed)
    assert asked == [(CPU, torch.float32, 64, 5)]


def test_without_the_package_torchs_own_kernel_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, exact)  # its module is there: that of flash-attn, which has the same name
    monkeypatch.setattr(kernel_packages, "version", version)
    assert attention.backend(GPU, torch.bfloat16, 64) == VARLEN


def test_a_package_that_does_not_load_leaves_torchs_kernel_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    attention.load_ahead()
    assert not caplog.messages
    assert {attention.backend(GPU, torch.bfloat16, 64) for _ in range(2)} == {VARLEN}
    (said,) = caplog.messages
    assert said.startswith("flash-attn-4 is installed and does not load (AttributeError(")


def test_it_is_loaded_ahead_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention.load_ahead()  # not installed
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    monkeypatch.setattr(kernel_packages, "version", lambda package: "4.0.0")
    assert "flash_attn.cute" not in sys.modules
    try:
        attention.load_ahead()
        assert "flash_attn.cute" in sys.modules
    finally:
        for name in ("flash_attn.cute", "flash_attn"):
            sys.modules.pop(name, None)


def test_the_right_function_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, exact)


def test_a_causal_mask_at_the_other_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_keys(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Each sequence's rows attend from its first key on."""
        own, seen = options["cu_seqlens_q"], options["cu_seqlens_k"]
        kept = torch.cat(
            [torch.arange(first, first + n) for first, n in zip(seen[:-1].tolist(), own.diff().tolist(), strict=True)]
        )
        return exact(query, key[kept], value[kept], **options | {"cu_seqlens_k": own})

    with pytest.raises(UnusableKernel, match=r"^flash-attn-4 4\.0\.0 computes attention wrong on this GPU: output is "):
        check(monkeypatch, first_keys)


@pytest.mark.parametrize(
    ("place", "named"), [(0, "the queries' gradient"), (1, "the keys' gradient"), (2, "the values' gradient")]
)
def test_a_wrong_gradient_is_found_though_the_output_is_right(place: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*inputs: Tensor, **options: Any) -> tuple[Tensor, None]:
        changed = list(inputs)
        changed[place] = 1.1 * inputs[place] - 0.1 * inputs[place].detach()
        return exact(*changed, **options)

    with pytest.raises(UnusableKernel, match=named):
        check(monkeypatch, wrong)


def test_a_gradient_that_is_not_finite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(query: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, None]:
        query = query * 1.0
        query.register_hook(lambda gradient: gradient.fill_(torch.nan))
        return exact(query, *inputs, **options)

    with pytest.raises(UnusableKernel, match="the queries' gradient is nan"):
        check(monkeypatch, broken)
