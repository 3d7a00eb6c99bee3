"""The experts of one layer at the Qwen3-30B-A3B shape on this machine's GPU: right, and how fast. Half a minute.

    python tests/gpu/experts.py OUT.json

Right: output and gradients of the grouped bfloat16 products, and of the kernels of Triton and quack, against one float32 product for each
expert; with all experts in use, and with most of them idle. Exit code 1 if one is further away than it should be. Fast: milliseconds of the GPU
and of the host, both ways of the sums with adapters in turns, and of
the products with narrow matrices. Without a GPU: a small shape.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from infra.megatron.model import kernels
from infra.megatron.model.experts import fused_gemm, grouped_gemm, triton_kernels
from infra.megatron.model.experts.grouped_gemm import Adapters
from infra.store.files import write_json

LARGE = {"num_experts": 128, "per_token": 8, "hidden": 2048, "ffn": 768}
SMALL = {"num_experts": 8, "per_token": 2, "hidden": 64, "ffn": 32}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the norm of the difference, by the norm of the reference."""
QUACK = "sums by quack"
WAYS = ("products by torch, sums by Triton", QUACK)
NAMES = ("output", "x", "share", "A1", "B1", "A2", "B2")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out, device = parser.parse_args().out, "cuda" if torch.cuda.is_available() else "cpu"
    shape, sizes = (LARGE, (1024, 4608, 8192, 13824)) if device == "cuda" else (SMALL, (64, 128))
    print(torch.__version__, torch.cuda.get_device_name() if device == "cuda" else "CPU", flush=True)
    found: dict[str, Any] = {"right": {}, "speed": {}}
    for dtype in TOLERANCES:
        for name, idle in (("all experts", 0), ("3 of 4 idle", shape["num_experts"] * 3 // 4), ("all but one idle", -1)):
            case = difference(Case(shape, sizes[0], 8, dtype, device, idle), dtype)
            found["right"][f"{dtype} {name}"] = case
            print(f"{dtype!s:15} {name:18} {case}", flush=True)
            write_json(out, found)
    for num_tokens in sizes[1:]:
        for rank in (0, 8, 16):
            turns: dict[str, list[dict[str, float]]] = {way: [] for way in (WAYS if rank else WAYS[:1])}
            for _ in range(5):
                for way, measured in turns.items():
                    with only(way):
                        measured.append(speed(shape, num_tokens, rank, device))
            for way, measured in turns.items():
                name = f"{num_tokens} tokens, rank {rank}, {way}"
                found["speed"][name] = {key: median(each[key] for each in measured) for key in measured[0]}
                found["speed"][name]["all_ms"] = [each["forward_and_backward_ms"] for each in measured]
                print(f"{name}: {found['speed'][name]}", flush=True)
            write_json(out, found)
    found["narrow"] = narrow_products(shape, sizes[-1], 8, device)
    for name, figures in found["narrow"].items():
        print(f"{sizes[-1]} tokens, rank 8, {name}: {figures}", flush=True)
    write_json(out, found)
    num_bad = sum(not case["ok"] for case in found["right"].values())
    print(f"{len(found['right']) - num_bad} passed, {num_bad} failed")
    return 1 if num_bad else 0


@contextmanager
def only(way: str) -> Any:
    with nullcontext() if way == QUACK else mock.patch.object(fused_gemm, "computes", lambda *_: False):
        yield


class Case:
    """Random weights, tokens and adapters of one layer; `num_idle` experts get no token (-1: only the last gets any)."""

    def __init__(self, shape: dict[str, int], num_tokens: int, rank: int, dtype: torch.dtype, device: str, num_idle: int) -> None:
        generator = torch.Generator(device).manual_seed(0)
        num_experts, hidden, ffn = shape["num_experts"], shape["hidden"], shape["ffn"]
        num_idle = num_experts - 1 if num_idle == -1 else num_idle

        def normal(*size: int, std: float) -> Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).mul_(std).to(dtype)

        used = min(num_experts - num_idle, shape["per_token"])
        scores = torch.rand(num_tokens, num_experts, generator=generator, device=device)
        scores[:, :num_idle] = -1
        experts_TK = scores.topk(used).indices
        self.path = grouped_gemm.route(experts_TK, num_experts)
        self.gate_up, self.down = normal(num_experts, 2 * ffn, hidden, std=0.02), normal(num_experts, hidden, ffn, std=0.02)
        self.x = normal(num_tokens, hidden, std=1.0)
        self.share = torch.rand(num_tokens * used, generator=generator, device=device)
        self.gradient = normal(num_tokens, hidden, std=1.0)
        self.matrices = (
            [
                *(normal(num_experts, 2 * rank, hidden, std=0.02), normal(num_experts, 2 * ffn, 2 * rank, std=0.02)),
                *(normal(num_experts, rank, ffn, std=0.02), normal(num_experts, hidden, rank, std=0.02)),
            ]
            if rank
            else []
        )

    def leaves(self) -> list[Tensor]:
        return [tensor.detach().requires_grad_() for tensor in (self.x, self.share, *self.matrices)]

    def forward(self, leaves: list[Tensor]) -> Tensor:
        x, share, *matrices = leaves
        adapters = Adapters((matrices[0], matrices[1]), (matrices[2], matrices[3]), 2.0) if matrices else None
        return grouped_gemm.experts_output(x, share, self.path, self.gate_up, self.down, adapters)

    def all_of_it(self) -> list[Tensor]:
        leaves = self.leaves()
        output = self.forward(leaves)
        output.backward(self.gradient)
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def in_float32(self) -> "Case":
        copy = object.__new__(Case)
        copy.path, copy.share = self.path, self.share
        for name in ("gate_up", "down", "x", "gradient"):
            setattr(copy, name, getattr(self, name).float())
        copy.matrices = [matrix.float() for matrix in self.matrices]
        return copy


@contextmanager
def plain() -> Any:
    """Neither Triton nor grouped products."""
    before, kernels._found = kernels._found, False
    try:
        yield
    finally:
        kernels._found = before


def difference(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    mine = case.all_of_it()
    with plain():
        expected = case.in_float32().all_of_it()
    apart = {
        name: float((a.float() - b).norm() / b.norm().clamp(min=1e-30)) for name, a, b in zip(NAMES, mine, expected, strict=True)
    }
    is_finite = all(bool(tensor.isfinite().all()) for tensor in mine)
    ok = is_finite and all(value <= TOLERANCES[dtype] for value in apart.values())
    return {name: float(f"{value:.2g}") for name, value in apart.items()} | {"ok": ok}


def speed(shape: dict[str, int], num_tokens: int, rank: int, device: str) -> dict[str, float]:
    """Milliseconds of one layer's experts, and of the arithmetic of the frozen weights and adapters what share of a second's."""
    case = Case(shape, num_tokens, rank, torch.bfloat16, device, 0)
    leaves = case.leaves()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        forward_s = seconds(lambda: case.forward(leaves), device)
    both_s = seconds(lambda: case.forward(leaves).backward(case.gradient), device)
    host_s = seconds(lambda: case.forward(leaves).backward(case.gradient), device, waits=False)
    weights = 3 * shape["hidden"] * shape["ffn"] + 3 * rank * (shape["hidden"] + shape["ffn"])
    flops = 2 * num_tokens * shape["per_token"] * weights
    adapters = 2 * num_tokens * shape["per_token"] * 3 * rank * (shape["hidden"] + shape["ffn"])
    return {
        "forward_ms": round(forward_s * 1e3, 3),
        "forward_and_backward_ms": round(both_s * 1e3, 3),
        "host_ms": round(host_s * 1e3, 3),
        "forward_tflops": round(flops / forward_s / 1e12, 1),
        "forward_and_backward_tflops": round((2 * flops + adapters) / both_s / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0.0,
    }


def narrow_products(shape: dict[str, int], num_tokens: int, rank: int, device: str) -> dict[str, dict[str, float]]:
    """Milliseconds of one layer's products with narrow matrices, by torch and by our kernels. torch needs tokens sorted by expert."""
    case = Case(shape, num_tokens, rank, torch.bfloat16, device, 0)
    a1, b1, a2, b2 = case.matrices
    path, num_rows = case.path, len(case.path.source_N)

    def rows(width: int) -> Tensor:
        return torch.randn(num_rows, width, device=device, dtype=torch.bfloat16)

    act, dinner, narrow1, narrow2 = (rows(width) for width in (shape["ffn"], 2 * shape["ffn"], 2 * rank, rank))
    x, dy = case.x, case.gradient
    products: dict[str, Callable[[], Tensor]] = {
        "A x, first layer": lambda: grouped_gemm.narrow_by_expert(x, a1.mT, path, 2.0, of_tokens=True),
        "A x, second layer": lambda: grouped_gemm.narrow_by_expert(act, a2.mT, path, 2.0),
        "gradient of A x, second layer": lambda: grouped_gemm.narrow_by_expert(dy, b2, path, 2.0, of_tokens=True),
        "gradient of A x, first layer": lambda: grouped_gemm.narrow_by_expert(dinner, b1, path, 2.0),
        "gradient of B, second layer": lambda: grouped_gemm.to_second(dy, narrow2, path, of_tokens=True),
        "gradient of A, second layer": lambda: grouped_gemm.to_first(narrow2, act, path),
        "gradient of B, first layer": lambda: grouped_gemm.to_second(dinner, narrow1, path),
        "gradient of A, first layer": lambda: grouped_gemm.to_first(narrow1, x, path, of_tokens=True),
    }
    found = {}
    for name, product in products.items():
        ours_s = seconds(product, device)
        with mock.patch.object(triton_kernels, "WIDEST", 0):
            torch_s = seconds(product, device)
        found[name] = {"torch_ms": round(torch_s * 1e3, 3), "ours_ms": round(ours_s * 1e3, 3)}
    return found


def seconds(work: Callable[[], Any], device: str, repeat: int = 10, *, waits: bool = True) -> float:
    """waits: Until the GPU has done it; otherwise the time that the host takes to ask for it."""
    for _ in range(3):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    if device == "cuda" and waits:
        torch.cuda.synchronize()
    asked_s = (time.perf_counter() - begin) / repeat
    if device == "cuda":
        torch.cuda.synchronize()
    return asked_s


if __name__ == "__main__":
    sys.exit(main())
