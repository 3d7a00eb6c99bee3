"""Where a step of the trainer goes on one GPU: seconds by size of micro-batch, and kernels by kind. Random weights, no model files.

    python tests/gpu/trainer_kernels.py OUT.json [--shape qwen2.5-0.5b] [--microbatch 16384 32768] [--repeat 3] [--profile]
        [--gradient FILE]

The checkout and this folder on PYTHONPATH. 64 prompts x 8, 512 + 512 tokens, prompts once per group. Sizes take turns; the first step of
each, which compiles kernels, is left out. `--profile` adds a table of one micro-batch of the last size: kernels by kind with their
launches, the time in which none runs, and the CPU's; OUT.operations.txt, operations by shape; and, of a whole step, the kernels before
which most time passes without one.
`--gradient` writes the gradient, or says how far it is from the one in the file. --small: a CPU, to see that it works.
"""

import argparse
import gc
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from infra.trainers.torchrun import ALLOCATOR

# As the trainer's programs have it; before torch looks.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)

import re
from itertools import pairwise

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from infra.megatron.lora.layers import Shard
from infra.megatron.loss.batch import Batch
from infra.megatron.model import parallel
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.protocol.job import TrainJob
from infra.store.files import write_json

sys.path.insert(0, str(Path(__file__).parent))
import prompts_once
from kernel_times import busy_us

KINDS = {
    "attention": r"flash|fmha|attn",
    "adapters of experts": r"by_expert|over_rows",
    "products of matrices": r"gemm|nvjet|cutlass|cublas|splitk|gemv|xmma",
    "SwiGLU": r"swiglu",
    "rotary positions": r"rotate",
    "logits: log-probabilities, maxima": r"softmax_sums|logprob|reduce_kernel.*max|max.*reduce",
    "copies of shared rows": r"combine_copies|index",
    "norms": r"norm",
    "optimizer": r"multi_tensor|adam",
    "joins (cat)": r"catarray",
    "copies and casts": r"copy|memcpy",
    "fills": r"fill|memset",
    "sums": r"add",
    "products by element": r"mul",
}
"""By the first that a kernel's name matches."""
REST = "the rest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=prompts_once.SHAPES)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--microbatch", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--entropy-bonus", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--gradient", type=Path, help="file of another run's gradient; written if it is not there")
    parser.add_argument("--small", action="store_true")
    o = parser.parse_args()
    name = "small" if o.small else o.shape
    shape = prompts_once.SHAPES[name] if o.small else prompts_once.Shape(o.prompts, 8, 512, 512, 0)
    prompts_once.RANK = o.rank
    job = prompts_once.make_job(o, "cpu" if o.small else "cuda")
    loss = job.trainer.loss.but(entropy_bonus=o.entropy_bonus)
    job = job.model_copy(update={"trainer": job.trainer.but(loss=loss)})
    layout = parallel.start(job)
    a, net, shards, adam = prompts_once.make_model(name, job.trainer, layout)
    batch = prompts_once.make_batch(shape, a.vocab_size)
    gc.collect()
    gc.freeze()  # as the persistent trainer does
    found: dict[str, Any] = {"command": sys.argv, "torch": torch.__version__, "shape": shape._asdict(), "steps": []}
    found["gpu"] = "CPU" if o.small else torch.cuda.get_device_name()
    for turn in range(o.repeat + 1):
        for size in o.microbatch:
            trainer = job.trainer.but(max_tokens_per_microbatch=size)
            step, gradient = prompts_once.run(net, shards, adam, batch, trainer, layout)
            step |= prompts_once.figures(a, trainer, batch, batch, step["seconds"])
            print({"warm-up": not turn} | {key: round(value, 4) for key, value in step.items()}, flush=True)
            if turn:
                found["steps"].append(step)
                write_json(o.out, found)
    found["gradient_norm"] = float(gradient.norm())
    if o.gradient and o.gradient.exists():
        found["gradient_distance"] = prompts_once.distance(gradient, torch.load(o.gradient))
    elif o.gradient:
        torch.save(gradient, o.gradient)
    if o.profile and not o.small:
        found["whole_step"] = gaps(net, shards, adam, batch, job, o, layout)
    found["medians"] = {size: median(found["steps"], size) for size in o.microbatch}
    if o.profile:
        few = prompts_once.make_batch(shape._replace(num_prompts=max(1, o.microbatch[-1] // 4607)), a.vocab_size)
        found["kernels"] = profiled(net, shards, adam, few, job, o, layout)
    write_json(o.out, found)
    print("\n".join(table(found)), flush=True)
    parallel.stop()


def median(steps: list[dict[str, Any]], size: int) -> dict[str, float]:
    same = [step for step in steps if step["microbatch"] == size]
    middle = statistics.median(step["seconds"] for step in same)
    return min(same, key=lambda step: abs(step["seconds"] - middle)) | {
        "least_s": min(step["seconds"] for step in same),
        "most_s": max(step["seconds"] for step in same),
    }


def profiled(
    net: nn.Module,
    shards: list[Shard],
    adam: torch.optim.AdamW,
    batch: Batch,
    job: TrainJob,
    o: argparse.Namespace,
    layout: ParallelContext,
) -> dict[str, Any]:
    """Milliseconds and launches of one step by kind of kernel, in the order of time."""
    trainer = job.trainer.but(max_tokens_per_microbatch=o.microbatch[-1])
    prompts_once.run(net, shards, adam, batch, trainer, layout)
    kinds = [ProfilerActivity.CPU] + ([] if o.small else [ProfilerActivity.CUDA])
    with profile(activities=kinds, record_shapes=True) as profiler:
        step = prompts_once.timed(net, shards, adam, batch, trainer, layout)
    by = "self_cpu_time_total" if o.small else "self_device_time_total"
    rows = profiler.key_averages(group_by_input_shape=True).table(
        sort_by=by, row_limit=90, max_name_column_width=60, max_shapes_column_width=90
    )
    o.out.with_suffix(".operations.txt").write_text(rows)
    # A span of the optimizer's name is no kernel.
    ran = [
        e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Optimizer.")
    ]
    spans = [(event.time_range.start, event.time_range.end) for event in ran]
    by_kind: dict[str, list[float]] = {}
    names: dict[str, float] = {}
    for event in ran:
        entry = by_kind.setdefault(kind_of(event.name), [0.0, 0])
        length = event.time_range.end - event.time_range.start
        entry[0] += length / 1e3
        entry[1] += 1
        names[event.name[:100]] = names.get(event.name[:100], 0.0) + length / 1e3
    return {
        "seconds": step["seconds"],
        "busy_ms": busy_us(spans) / 1e3,
        "kinds": dict(sorted(by_kind.items(), key=lambda item: -item[1][0])),
        "names": dict(sorted(names.items(), key=lambda item: -item[1])[:40]),
    }


def gaps(
    net: nn.Module,
    shards: list[Shard],
    adam: torch.optim.AdamW,
    batch: Batch,
    job: TrainJob,
    o: argparse.Namespace,
    layout: ParallelContext,
) -> dict[str, float]:
    """Of a whole step, in seconds: all of it, kernels, from the first kernel to the last, and the longest times in which none ran."""
    trainer = job.trainer.but(max_tokens_per_microbatch=o.microbatch[-1])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step = prompts_once.timed(net, shards, adam, batch, trainer, layout)
    ran = [e.time_range for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.start, e.end) for e in ran)
    longest = sorted((b[0] - a[1] for a, b in pairwise(spans)), reverse=True)
    print(
        "\n".join(f"{ms:8.2f} ms in {count:4} gaps before {name}" for name, (ms, count) in before_kernels(profiler).items()),
        flush=True,
    )
    found = {"seconds": step["seconds"], "kernels": busy_us(spans) / 1e6, "span": (spans[-1][1] - spans[0][0]) / 1e6}
    return (
        found
        | {f"gap {i}": length / 1e6 for i, length in enumerate(longest[:6])}
        | {"gaps above 20 us": sum(length for length in longest if length > 20) / 1e6}
    )


def before_kernels(profiler: profile) -> dict[str, tuple[float, int]]:
    """The 25 kernels before which most time passes without one: milliseconds in gaps of more than 20 us, and their number."""
    ran = sorted(
        (e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start
    )
    found: dict[str, tuple[float, int]] = {}
    for before, after in pairwise(ran):
        if (gap := after.time_range.start - before.time_range.end) > 20:
            name = f"{after.name[:90]}, after {before.name[:60]}"
            ms, count = found.get(name, (0.0, 0))
            found[name] = (ms + gap / 1e3, count + 1)
    return dict(sorted(found.items(), key=lambda item: -item[1][0])[:25])


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower())), REST)


def table(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['gpu']}, torch {found['torch']}, gradient norm {found['gradient_norm']:.6g}, {found.get('gradient_distance')}"
    ]
    for size, row in found["medians"].items():
        memory = f"peak {row['peak_reserved_gib']:.1f} GiB" if "peak_reserved_gib" in row else ""
        seconds = f"{row['seconds']:.3f} s ({row['least_s']:.3f} to {row['most_s']:.3f})"
        lines.append(
            f"micro-batches of {size}: {seconds}  {row['tokens_per_s']:.0f} tokens/s  MFU {row.get('mfu', 0):.1%}  {memory}"
        )
    if "whole_step" in found:
        lines.append(f"a whole step: { {name: round(value, 4) for name, value in found['whole_step'].items()} }")
    if "kernels" in found:
        kernels = found["kernels"]
        lines.append(f"one micro-batch: {kernels['seconds'] * 1e3:.0f} ms, of it kernels {kernels['busy_ms']:.1f} ms")
        lines += [f"  {kind:36} {ms:8.2f} ms {count:6.0f} launches" for kind, (ms, count) in kernels["kinds"].items()]
    return lines


if __name__ == "__main__":
    main()
