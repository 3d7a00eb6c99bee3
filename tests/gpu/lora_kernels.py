"""SGLang's kernels for LoRA and ours (infra/engines/launchers/decoding/sglang_lora_kernels.py) in a decoding step: whether ours are right, and
how many microseconds both take.

    RATCHET_SGLANG_PYTHON tests/gpu/lora_kernels.py [OUT.json] [--requests 512 64] [--rank 16] [--hidden 3584] [--width 18944] [--kv 512]

The default shapes are those of Qwen2.5-7B. Each figure is of CUDA graphs with a launch for each of 14 layers, three times each way in turns; the
median. Runs in SGLang's environment. `tests/infra/engines/launchers/test_sglang_lora_kernels.py` compares in small, in Triton's interpreter.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

KERNELS = Path(__file__).resolve().parents[2] / "infra/engines/launchers/decoding/sglang_lora_kernels.py"
LAYERS, REPLAYS, TURNS = 14, 20, 3
SLOTS, SCALING = 2, 2.0


def ours() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_lora_kernels", KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_lora_kernels"] = module
    spec.loader.exec_module(module)
    return module


def batch_of(slots: Sequence[int], ranks: Sequence[int], device: str) -> Any:
    """What SGLang says of a decoding step: its requests' slots, the ranks of the adapters in them (0: the base model)."""
    integers = {"dtype": torch.int32, "device": device}
    of = torch.tensor(slots, **integers)
    lengths = torch.tensor([slots.count(slot) for slot in range(len(ranks))], **integers)
    return SimpleNamespace(
        bs=len(ranks), max_len=len(slots), seg_lens=lengths, seg_indptr=torch.tensor([0, *itertools.accumulate(lengths.tolist())], **integers),
        weight_indices=torch.arange(len(ranks), **integers), lora_ranks=torch.tensor(ranks, **integers),
        scalings=torch.full((len(ranks),), SCALING, device=device), permutation=torch.argsort(of, stable=True).to(torch.int32),
    )  # fmt: skip


def prefill_of(lengths: Sequence[int], slots: Sequence[int], ranks: Sequence[int], device: str) -> Any:
    """The same of a step in which requests have several tokens each."""
    integers = {"dtype": torch.int32, "device": device}
    return SimpleNamespace(
        bs=len(lengths), max_len=max(lengths), seg_lens=torch.tensor(lengths, **integers),
        seg_indptr=torch.tensor([0, *itertools.accumulate(lengths)], **integers), weight_indices=torch.tensor(slots, **integers),
        lora_ranks=torch.tensor(ranks, **integers), scalings=torch.full((len(ranks),), SCALING, device=device), permutation=None,
    )  # fmt: skip


def by_torch(
    x: Tensor, weights: Tensor, slots: Sequence[int], ranks: Sequence[int], widths: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """x A^T of each token in float32 (`widths` empty), or its change of the output: one for the whole batch, and the rows that have an adapter."""
    rows = [i for i, slot in enumerate(slots) if ranks[slot]]
    made = []
    for i in rows:
        rank, w = ranks[slots[i]], weights[slots[i]].float()
        if not widths:
            made.append(w @ x[i].float())
            continue
        ends = [0, *itertools.accumulate(widths)]
        slices = [w[a:b, :rank] @ x[i, k * rank : (k + 1) * rank].float() for k, (a, b) in enumerate(itertools.pairwise(ends))]
        made.append(SCALING * torch.cat(slices))
    return torch.tensor(rows), made


def right(
    kernels: Any, device: str, dtype: torch.dtype, inputs: Sequence[int], widths: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Largest distance of ours from float32, relative to the largest value, by case. Errors: AssertionError where it is more than rounding, where
    two calls differ, or where rows of the base model were changed."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    some, all_of_one = [i % 3 % 2 for i in range(75)], [1] * 40
    rounding = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for (slots, ranks), count in itertools.product(
        ((all_of_one, (0, 16)), (some, (0, 16)), (some, (8, 16)), (all_of_one, (0, 24))), (1, 2, 3)
    ):
        batch, largest = batch_of(slots, ranks, device), max(16, *ranks)
        for width in inputs:
            x = torch.randn(len(slots), width, device=device, dtype=dtype)
            weights = torch.randn(len(ranks), count * largest, width, device=device, dtype=dtype) / width**0.5
            made, again = (kernels.shrink(x, weights, batch, count) for _ in range(2))
            for row, want in zip(*by_torch(x, weights, slots, ranks, ()), strict=True):
                has = count * ranks[slots[row]]
                name = f"shrink {width}, {count} slices, ranks {ranks}"
                assert torch.equal(made[row, :has], again[row, :has]), name
                found[name] = max(found.get(name, 0.0), apart(made[row, :has], want[:has]))
    for slots, ranks, lengths in (
        (all_of_one, (0, 16), None),
        (some, (0, 16), None),
        (some, (8, 24), None),
        ([1, 0, 1], (0, 16), [70, 3, 1]),
    ):
        batch = prefill_of(lengths, slots, ranks, device) if lengths else batch_of(slots, ranks, device)
        of_tokens = [slot for slot, num in zip(slots, lengths or [1] * len(slots), strict=True) for _ in range(num)]
        for sizes in widths:
            largest = max(ranks)
            x = torch.randn(len(of_tokens), len(sizes) * largest, device=device, dtype=dtype)
            weights = torch.randn(len(ranks), sum(sizes), largest, device=device, dtype=dtype) / largest**0.5
            before = torch.randn(len(of_tokens), sum(sizes), device=device, dtype=dtype)
            made, again = (kernels.expand(x, weights, batch, tuple(sizes), before.clone()) for _ in range(2))
            name = f"expand {sizes}, ranks {ranks}{', prefill' if lengths else ''}"
            assert torch.equal(made, again), name
            rows, changes = by_torch(x, weights, of_tokens, ranks, sizes)
            for row, change in zip(rows, changes, strict=True):
                found[name] = max(found.get(name, 0.0), apart(made[row], before[row].float() + change))
            untouched = [i for i in range(len(of_tokens)) if i not in rows]
            assert torch.equal(made[untouched], before[untouched]), name
    wrong = {name: distance for name, distance in found.items() if not distance < rounding}
    assert not wrong, wrong
    return found


def apart(made: Tensor, want: Tensor) -> float:
    return float((made.float() - want).abs().max() / want.abs().max())


def microseconds(call: Callable[[int], object]) -> float:
    """Of one launch."""
    for _ in range(2):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            call(layer)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS / LAYERS


def speed(kernels: Any, o: argparse.Namespace, requests: int) -> dict[str, dict[str, float]]:
    from sglang.kernels.ops.gemm.gate_up_lora_b import gate_up_lora_b_fwd
    from sglang.kernels.ops.gemm.qkv_lora_b import qkv_lora_b_fwd
    from sglang.kernels.ops.gemm.sgemm_lora_a import sgemm_lora_a_fwd
    from sglang.kernels.ops.gemm.sgemm_lora_b import sgemm_lora_b_fwd

    batch, ways = batch_of([1] * requests, (0, o.rank), "cuda"), {}

    def random(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5 for _ in range(LAYERS)]

    qkv, gate_up = (o.hidden, o.kv, o.kv), (o.width, o.width)
    for name, inputs, count in (("q, k, v", o.hidden, 3), ("o", o.hidden, 1), ("gate, up", o.hidden, 2), ("down", o.width, 1)):
        x, a = random(requests, inputs), random(SLOTS, count * o.rank, inputs)
        ways[f"A of {name}"] = (
            lambda i, x=x, a=a, count=count: sgemm_lora_a_fwd(x[i], a[i], batch, count),
            lambda i, x=x, a=a, count=count: kernels.shrink(x[i], a[i], batch, count),
        )
    offsets = torch.tensor([0, *itertools.accumulate(qkv)], dtype=torch.int32, device="cuda")
    for name, widths in (("q, k, v", qkv), ("o and down", (o.hidden,)), ("gate, up", gate_up)):
        x, b, y = random(requests, len(widths) * o.rank), random(SLOTS, sum(widths), o.rank), random(requests, sum(widths))
        theirs: Callable[..., object] = {
            1: lambda i, y, x=x, b=b: sgemm_lora_b_fwd(x[i], b[i], batch, y),
            2: lambda i, y, x=x, b=b: gate_up_lora_b_fwd(x[i], b[i], batch, o.width, y),
            3: lambda i, y, x=x, b=b: qkv_lora_b_fwd(x[i], b[i], batch, offsets, o.hidden, y),
        }[len(widths)]
        mine = lambda i, y, x=x, b=b, widths=widths: kernels.expand(x[i], b[i], batch, widths, y)  # noqa: E731
        results = [way(0, y[0].clone()) for way in (theirs, mine)]
        print(f"B of {name}, {requests} requests: {'the same bits' if torch.equal(*results) else 'other bits'}", flush=True)  # type: ignore[arg-type]
        ways[f"B of {name}"] = (lambda i, y=y, way=theirs: way(i, y[i]), lambda i, y=y, way=mine: way(i, y[i]))
    found: dict[str, dict[str, float]] = {}
    for name, both in ways.items():
        turns = [[microseconds(way) for way in both] for _ in range(TURNS)]
        found[name] = {
            who: round(statistics.median(us), 2)
            for who, us in zip(("sglang_us", "ours_us"), zip(*turns, strict=True), strict=True)
        }
        print(f"{requests} requests, {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, nargs="?")
    p.add_argument("--requests", type=int, nargs="+", default=[512, 64])
    for name, default in {"rank": 16, "hidden": 3584, "width": 18944, "kv": 512}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    o, kernels = p.parse_args(), ours()
    distances = right(
        kernels,
        "cuda",
        torch.bfloat16,
        (300, o.hidden, o.width),
        ((o.hidden,), (o.width, o.width), (o.hidden, o.kv, o.kv), (72, 24, 24)),
    )
    print(f"ours are right: at most {max(distances.values()):.2g} of the largest value from float32", flush=True)
    found = {"command": sys.argv, "gpu": torch.cuda.get_device_name(), "apart": distances}
    found["us"] = {str(requests): speed(kernels, o, requests) for requests in o.requests}
    if o.out:
        o.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
