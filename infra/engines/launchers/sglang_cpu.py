"""Shims that let SGLang 0.5.18 run on a machine without CUDA. `sglang_server.py` imports this before SGLang.

Runs in SGLang's own environment and imports nothing of ours. Each shim below handles one place where SGLang assumes a GPU. The top level
also runs in every process that the server spawns, before SGLang is imported in it.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # makes SGLang's is_cpu() true
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a spinning OpenMP pool on shared cores costs up to 20x
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first request waits 4 to 15 s for a C++ compiler

import torch

SGL_KERNEL_NAMES = (
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)

MIN_ROWS = 16
"""Smallest number of rows in a matrix product. Fewer rows are padded with zeros."""
REPLACED: list[torch.library.Library] = []
"""Libraries that hold the replaced torch operators. The replacement lasts as long as they exist."""


def declare_torchvision_operators() -> None:
    """Declare two operators. torchvision's wheel is a CUDA build: with a CPU torch its import fails without them."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def mock_triton() -> None:
    """Replace triton by the mock that SGLang ships for macOS. SGLang imports triton everywhere, but does not call it on a CPU."""
    if importlib.util.find_spec("triton") is not None:
        return
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations
    # Loaded by path: importing the package would already import triton.
    spec = importlib.util.spec_from_file_location(
        "_sglang_platform_stubs", sglang.submodule_search_locations[0] + "/_platform_stubs.py"
    )
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)

    class TritonImporter:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            ours = name.split(".")[0] == "triton"
            return importlib.util.spec_from_loader(name, TritonImporter, is_package=True) if ours else None  # type: ignore[arg-type]

        @staticmethod
        def create_module(spec: Any) -> Any:
            return stubs._MockModule(spec.name)

        @staticmethod
        def exec_module(module: object) -> None:
            pass

    sys.meta_path.insert(0, TritonImporter)  # type: ignore[arg-type]
    import triton
    import triton.language

    triton.__version__, triton.cdiv = "3.0.0", stubs._cdiv
    triton.next_power_of_2, triton.Config = stubs._next_power_of_2, stubs._Config
    triton.language.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)})


def stub_sgl_kernel() -> None:
    """Stub sgl_kernel: no package index has its CPU build. Its names belong to speculative decoding and KV moves, which are off here."""

    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError("sgl_kernel's CPU operators are not built here")

    module = types.ModuleType("sgl_kernel")
    for name in SGL_KERNEL_NAMES:
        setattr(module, name, absent)
    sys.modules["sgl_kernel"] = module


def ignore_pin_memory() -> None:
    """Ignore requests to pin memory. SGLang's LoRA code pins host memory unconditionally. That is only a hint, but an error in a CPU torch."""

    def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """[B] seeds, [B] positions, [V] columns -> [B, V] hashes: sglang/kernels/ops/sampling/murmur_hash.py in torch, not triton."""
    mask = 0xFFFFFFFF

    def rotl(x: torch.Tensor, r: int) -> torch.Tensor:
        return ((x << r) | (x >> (32 - r))) & mask

    s = seed.view(torch.int64)
    keys = (
        (s & mask)[:, None],
        ((s >> 32) & mask)[:, None],
        (positions.to(torch.int64) & mask)[:, None],
        col_indices.to(torch.int64)[None, :],
    )
    h = torch.zeros((), dtype=torch.int64)
    for key in keys:
        h = h ^ (rotl((key * 0xCC9E2D51) & mask, 15) * 0x1B873593 & mask)
        h = (rotl(h, 13) * 5 + 0xE6546B64) & mask
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
    return h ^ (h >> 16)


def multiply_rows_alike() -> None:
    """Make a row of a matrix product the same bits however many rows are multiplied with it, as SGLang's own mode does on a GPU.

    The composition of a batch depends on timing. Products of 1 to 3 rows take another path in torch's CPU library than larger ones. As a
    result, 4 of 2219 log-probs of one rollout differed in their last bits when the rollout was repeated.
    """

    def mm(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        if count < MIN_ROWS:
            rows = torch.cat([rows, rows.new_zeros(MIN_ROWS - count, rows.shape[1])])
        # The variant with `out` is not replaced, so this does not recurse.
        return torch.mm(rows, matrix, out=rows.new_empty(len(rows), matrix.shape[1]))[:count]

    def addmm(
        summand: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        product = mm(rows, matrix) * alpha
        return product + summand * beta if beta else product  # with beta 0 the summand may hold anything, even NaN

    def addmm_in_place(
        summand: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        return summand.copy_(addmm(summand, rows, matrix, beta=beta, alpha=alpha))

    if REPLACED:
        return
    REPLACED.append(torch.library.Library("aten", "IMPL"))  # type: ignore[no-untyped-call]  # torch
    for name, replacement in {"mm": mm, "addmm": addmm, "addmm_": addmm_in_place}.items():
        REPLACED[0].impl(name, replacement, "CPU")  # type: ignore[no-untyped-call]  # torch


def allow_deterministic_inference() -> None:
    """Allow deterministic inference with torch_native, without its CUDA-only parts. sampling_seed has no effect otherwise."""
    import sglang.kernels.ops.sampling.murmur_hash
    import sglang.srt.batch_invariant_ops
    from sglang.srt import server_args

    sglang.kernels.ops.sampling.murmur_hash.murmur_hash32 = murmur_hash32
    sglang.srt.batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: multiply_rows_alike()
    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


declare_torchvision_operators()
mock_triton()
stub_sgl_kernel()
ignore_pin_memory()
if "--enable-deterministic-inference" in sys.argv:
    allow_deterministic_inference()
