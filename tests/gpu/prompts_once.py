"""A step of the trainer that computes each prompt once per group, against one that computes it for each sample. One GPU, one call.

    python tests/gpu/prompts_once.py OUT.json [--shapes qwen2.5-7b qwen2.5-0.5b] [--repeat 3] [--microbatch TOKENS] [--limit-s 560]

The checkout and this folder on PYTHONPATH; no model files are needed, weights are random. First it checks the attention kernel's causal
mask, and that shared rows get the gradient of their copies in equal bytes each time; it stops with a message if not. Then, for each shape,
whole steps (forward, backward, AdamW) on the same samples, alternating: `separate`, each sample a group of its own, so that nothing is
shared; `shared`, the groups as they are. Last a `separate` step in other micro-batches: the size of rounding.

    qwen2.5-7b     64 prompts x 8, 512 + 512 tokens, rank 16
    qwen2.5-0.5b   64 prompts x 5, 150 + 300 tokens, rank 16
    qwen3-30b-a3b, qwen3-30b-a3b-12-layers    64 prompts x 8, 512 + 512 tokens, rank 16

OUT.json is written after each step. Printed at the end, for each shape: median seconds (and their range), samples' tokens/s, MFU, peak
memory of both; the gain; the gradients' distance from `separate` (L2, relative) of `shared`, of other micro-batches and of a repetition.
Exit code 1 if `shared` is further away than 1.5 times other micro-batches. A 7B run takes 4 minutes, 0.5B one. --small: a CPU, to see that it works.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from infra.trainers.torchrun import ALLOCATOR

# As the trainer's programs have it; before torch looks.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)

import torch
from torch import Tensor, nn

from infra.config import TrainerConfig
from infra.machine import devices
from infra.megatron.lora import layers as lora
from infra.megatron.lora.layers import Shard
from infra.megatron.loss.batch import Batch
from infra.megatron.model import attention, build, kernels, parallel
from infra.megatron.model.copies import combine, copies_of, gather, saved_as_rows
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.model.rotary import Packed
from infra.megatron.program import optimizer, throughput
from infra.megatron.program.train_step import train_step
from infra.megatron.protocol.job import TrainJob
from infra.models.architecture import Architecture, parse_architecture
from infra.store.files import write_json

sys.path.insert(0, str(Path(__file__).parent))
import random_model

LIMIT = 1.5
RANK = 16


class Shape(NamedTuple):
    num_prompts: int
    group_size: int
    prompt_tokens: int
    answer_tokens: int
    microbatch: int


SHAPES = {
    "qwen2.5-7b": Shape(64, 8, 512, 512, 16384),
    "qwen2.5-0.5b": Shape(64, 5, 150, 300, 32768),
    "qwen3-30b-a3b-12-layers": Shape(64, 8, 512, 512, 13824),
    "qwen3-30b-a3b": Shape(64, 8, 512, 512, 13824),
    "small": Shape(4, 3, 12, 10, 64),
    "small-moe": Shape(4, 3, 12, 10, 64),
}
SMALL_GPU_MICROBATCH = 9728
"""Of the 7B shape below 100 GiB: two groups of 4,607 rows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-7b", "qwen2.5-0.5b"], choices=SHAPES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--microbatch", type=int, help="default: by shape and memory")
    parser.add_argument("--limit-s", type=float, default=560, help="no step begins that would end later")
    parser.add_argument("--small", action="store_true")
    o = parser.parse_args()
    if not o.small and not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU here; --small tries the script out on a CPU")
    shapes = ["small", "small-moe"] if o.small else o.shapes
    device = "cpu" if o.small else "cuda"
    job = make_job(o, device)
    layout = parallel.start(job)
    check_attention(layout.device)
    check_sums(layout.device)
    found: dict[str, Any] = {
        "command": sys.argv,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "attention": attention.backend(layout.device, build.base_dtype(job.trainer, layout.device), 64),
        "kernels": kernels.usable(torch.ones(1, device=layout.device)),
        "shapes": {},
    }
    end = time.monotonic() + o.limit_s
    for name in shapes:
        found["shapes"][name] = {}
        measure(name, o, job, layout, found, end)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    parallel.stop()
    print("\n".join(table(found)), flush=True)
    is_near = all(each.get("ok", False) for each in found["shapes"].values())
    print("done" if is_near or o.small else "TOO FAR APART, or not measured")
    return 0 if is_near or o.small else 1


def make_job(o: argparse.Namespace, device: str) -> TrainJob:
    """Decoupled: ratios are exactly 1, so that rounding clips no token here and another one there."""
    nowhere = o.out.parent
    return TrainJob(
        model_path=nowhere,
        base_model_id="random",
        adapter_path=None,
        adapter_version=0,
        num_optimizer_steps=0,
        adapter_sha256="base",
        batch_path=nowhere / "batch.safetensors",
        output_dir=nowhere,
        result_path=nowhere / "result.json",
        seed=0,
        num_threads=8 if device == "cuda" else 1,
        device=device,  # type: ignore[arg-type]
        trainer=TrainerConfig(
            lora={"rank": RANK, "alpha": 2 * RANK},
            loss={"correction": {"mode": "decoupled"}},
            learning_rate=1e-30,  # the adapter stays the same in float32
            max_grad_norm=1e30,
        ),
    )


def check_attention(device: torch.device) -> None:
    """Stop unless the kernel lets the last query see all keys, the one before it all but one, and so on."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    own, seen, tolerance = [3, 64, 200], [300, 64, 457], 2e-2 if dtype is torch.bfloat16 else 1e-5
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(sum(own), 4, 64), (sum(seen), 2, 64), (sum(seen), 2, 64)]
    inputs = [torch.randn(*size, device=device, generator=generator).to(dtype) for size in sizes]
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, *own], device=device).cumsum(0).int(),
        cu_seqlens_kv=torch.tensor([0, *seen], device=device).cumsum(0).int(),
        max_seqlen_q=max(own),
        max_seqlen_kv=max(seen),
    )
    attend = attention.ATTEND[attention.backend(device, dtype, 64)]
    mine = with_gradients(lambda q, k, v: attend(q, k, v, packed, 0.125), inputs)
    plain = with_gradients(lambda q, k, v: by_hand(q, k, v, own, seen, last=True), [x.float() for x in inputs])
    top_left = with_gradients(lambda q, k, v: by_hand(q, k, v, own, seen, last=False), [x.float() for x in inputs])
    names = ("output", "query's", "key's", "value's gradient")
    far = {name: distance(a, b) for name, a, b in zip(names, mine, plain, strict=True)}
    print(f"attention against plain float32: { {name: f'{value:.1e}' for name, value in far.items()} }", flush=True)
    if max(far.values()) > tolerance:
        where = "the FIRST query and key" if distance(mine[0], top_left[0]) < tolerance else "neither end"
        sys.exit(
            f"STOP: the causal mask of {attention.backend(device, dtype, 64)} in torch {torch.__version__} is aligned at {where}, or its "
            f"gradients are wrong; shared prompts need the last query to see the last key. Distances: {far}"
        )


def by_hand(q: Tensor, k: Tensor, v: Tensor, own: list[int], seen: list[int], *, last: bool) -> Tensor:
    outputs = []
    for q_, k_, v_ in zip(q.split(own), k.split(seen), v.split(seen), strict=True):
        k_, v_ = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k_, v_))
        offset = len(k_) - len(q_) if last else 0
        mask = torch.ones(len(q_), len(k_), dtype=torch.bool, device=q.device).tril(offset)
        scores = torch.einsum("thd,shd->hts", q_, k_) * 0.125
        outputs.append(torch.einsum("hts,shd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v_))
    return torch.cat(outputs)


def with_gradients(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    output.backward(output.detach().roll(1, 0))
    return [output.detach(), *(x.grad for x in leaves)]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def check_sums(device: torch.device) -> None:
    """Stop unless copies add up to what plain float32 gives, in equal bytes each time, and are not saved for the backward pass."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.cat([torch.arange(n) for n in (700, 300, 300, 512, 1, 300)])
    on_host = copies_of(source, 800)
    copies = type(on_host)(*(x.to(device) for x in on_host))
    copied = torch.randn(len(source), 4, 128, device=device).to(dtype)
    sums = [combine(copied, copies.order_N, copies.starts) for _ in range(10)]
    expected = torch.zeros(800, 4, 128).index_add_(0, source, copied.float().cpu())
    if not all(torch.equal(sums[0], each) for each in sums) or distance(sums[0].cpu(), expected) > 5e-3:
        sys.exit(f"STOP: sums of copies are {distance(sums[0].cpu(), expected):.1e} away, or not the same each time")
    rows = torch.randn(800, 4, 128, device=device, dtype=dtype, requires_grad=True)
    wide = gather(rows, copies)
    with saved_as_rows(copies, (wide, rows)):
        squares = wide.square()
    squares.sum().backward()
    if rows.grad is None or distance(rows.grad, 2 * rows.detach() * copies.starts.diff()[:, None, None]) > 5e-3:
        sys.exit("STOP: copies that were saved as rows give a wrong gradient")
    print("sums of copies: equal bytes each time", flush=True)


def measure(name: str, o: argparse.Namespace, job: TrainJob, layout: ParallelContext, found: dict[str, Any], end: float) -> None:
    shape, case = SHAPES[name], found["shapes"][name]
    a, net, shards, adam = make_model(name, job.trainer, layout)
    shared = make_batch(shape, a.vocab_size)
    separate = dataclasses.replace(shared, groups=None)
    first = o.microbatch or microbatch_of(name)
    case |= {"shape": shape._asdict(), "rank": RANK, "microbatch": first, "steps": []}
    sizes = {"separate": first, "shared": first, "other micro-batches": first * 5 // 8}
    batches = {"separate": separate, "shared": shared, "other micro-batches": separate}
    few = make_batch(shape._replace(num_prompts=2), a.vocab_size)
    for warm in (few, dataclasses.replace(few, groups=None)):  # kernels are compiled
        run(net, shards, adam, warm, job.trainer.but(max_tokens_per_microbatch=first), layout)
    gradients: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for kind in [*["separate", "shared"] * o.repeat, "other micro-batches"]:
        if time.monotonic() + seconds.get(kind, seconds.get("separate", 0.0)) * 1.1 > end:
            print(f"{name}: no time is left for another step, {kind}", flush=True)
            continue
        trainer = job.trainer.but(max_tokens_per_microbatch=sizes[kind])
        step, gradient = run(net, shards, adam, batches[kind], trainer, layout)
        step = {"kind": kind} | step | figures(a, trainer, batches[kind], shared, step["seconds"])
        step |= {f"from first {which}": distance(gradient, other) for which, other in gradients.items()}
        gradients.setdefault(kind, gradient)
        seconds[kind] = step["seconds"]
        case["steps"].append(step)
        print(name, step, flush=True)
        write_json(o.out, found)
    case |= summary(case["steps"])
    write_json(o.out, found)


def microbatch_of(name: str) -> int:
    is_small_gpu = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100 * 2**30
    return SMALL_GPU_MICROBATCH if name == "qwen2.5-7b" and is_small_gpu else SHAPES[name].microbatch


def make_model(
    name: str, trainer: TrainerConfig, layout: ParallelContext
) -> tuple[Architecture, nn.Module, list[Shard], torch.optim.AdamW]:
    """Random weights as a model begins, and adapters that already change something."""
    fields = random_model.COMMON | random_model.SHAPES[name]
    a = parse_architecture(fields | {"model_type": "qwen3_moe" if "num_experts" in fields else "qwen2"})
    net = build.build(a, trainer, layout)
    generator = torch.Generator(layout.device).manual_seed(0)
    with torch.no_grad():
        for path, parameter in net.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, fields.get("initializer_range", 0.02), generator=generator)
            else:
                parameter.fill_(float("norm" in path))
        shards = lora.attach(net, a, trainer.lora, layout, sequence_parallel=False)
        for shard in shards:
            shard.parameter.normal_(0, 0.01, generator=generator)
    return a, net, shards, optimizer.build(shards, trainer)


def make_batch(shape: Shape, vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens: list[Tensor] = []
    num_samples, length = shape.num_prompts * shape.group_size, shape.prompt_tokens + shape.answer_tokens
    for _ in range(shape.num_prompts):
        prompt = torch.randint(0, vocab_size, (shape.prompt_tokens,), generator=generator)
        for _ in range(shape.group_size):
            tokens += [prompt, torch.randint(0, vocab_size, (shape.answer_tokens,), generator=generator)]
    is_loss = (torch.arange(length) >= shape.prompt_tokens).repeat(num_samples)
    advantages = torch.randn(num_samples, generator=generator).repeat_interleave(length)
    return Batch(
        adapter_version=0,
        adapter_sha256="base",
        temperature=1.0,
        tokens=torch.cat(tokens),
        starts=list(range(0, num_samples * length + 1, length)),
        is_loss_token=is_loss,
        rollout_logprobs=torch.where(is_loss, -torch.tensor(float(vocab_size)).log(), 0.0),
        advantages=torch.where(is_loss, advantages, 0.0),
        groups=[i // shape.group_size for i in range(num_samples)],
    )


def run(
    net: nn.Module, shards: list[Shard], adam: torch.optim.AdamW, batch: Batch, trainer: TrainerConfig, layout: ParallelContext
) -> tuple[dict[str, Any], Tensor]:
    """One step: its figures, and its gradient on the host."""
    found = timed(net, shards, adam, batch, trainer, layout)
    gradient = torch.cat([shard.parameter.grad.flatten().cpu() for shard in shards if shard.parameter.grad is not None])
    return found, gradient


def timed(
    net: nn.Module, shards: list[Shard], adam: torch.optim.AdamW, batch: Batch, trainer: TrainerConfig, layout: ParallelContext
) -> dict[str, Any]:
    """One step: its figures."""
    on_gpu = layout.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    metrics, _ = train_step(net, shards, adam, batch, trainer, layout, meanwhile=lambda: None)
    if on_gpu:
        torch.cuda.synchronize()
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin, "loss": metrics["train/loss"]}
    found |= {"grad_norm": metrics["train/grad_norm"], "microbatch": trainer.microbatch_tokens}
    if on_gpu:
        found["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


def figures(a: Architecture, trainer: TrainerConfig, batch: Batch, shared: Batch, seconds: float) -> dict[str, float]:
    """tokens_per_s counts the samples' tokens, each with its prompt; MFU what this way of computing has to compute."""
    everything = list(range(batch.num_sequences))
    work = throughput.work_of(batch, everything)
    found = {"rows": work.num_rows, "tokens_per_s": len(batch.tokens) / seconds, "rows_per_s": work.num_rows / seconds}
    if torch.cuda.is_available() and (peak := devices.peak_flops(torch.cuda.get_device_name())):
        found["pflop"] = throughput.step_flops(a, trainer.lora, work) / 1e15
        found["mfu"] = found["pflop"] * 1e15 / seconds / peak
    return found


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    by_kind = {kind: [step for step in steps if step["kind"] == kind] for kind in ("separate", "shared", "other micro-batches")}
    found: dict[str, Any] = {}
    for kind in ("separate", "shared"):
        if not by_kind[kind]:
            return {"ok": False}
        all_s = [step["seconds"] for step in by_kind[kind]]
        middle = min(by_kind[kind], key=lambda step: abs(step["seconds"] - statistics.median(all_s)))
        found[kind] = {"seconds": statistics.median(all_s), "least_s": min(all_s), "most_s": max(all_s)} | {
            name: middle[name] for name in ("tokens_per_s", "mfu", "peak_allocated_gib", "peak_reserved_gib") if name in middle
        }
    found["gain"] = found["separate"]["seconds"] / found["shared"]["seconds"]
    found["gradient_shared"] = max(step["from first separate"] for step in by_kind["shared"])
    again = [step["from first separate"] for step in by_kind["separate"][1:]]
    found["gradient_repetition"] = max(again) if again else None
    if not by_kind["other micro-batches"]:
        return found | {"ok": False}
    found["gradient_other_microbatches"] = by_kind["other micro-batches"][0]["from first separate"]
    found["ratio"] = found["gradient_shared"] / found["gradient_other_microbatches"]
    return found | {"limit": LIMIT, "ok": found["ratio"] <= LIMIT}


def table(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['gpu']}, torch {found['versions']['torch']}, {found['attention']}"]
    for name, case in found["shapes"].items():
        lines.append(f"{name}, micro-batches of {case['microbatch']} tokens")
        for kind in ("separate", "shared"):
            if kind in case:
                row = case[kind]
                memory = f"{row['peak_allocated_gib']:.1f} GiB" if "peak_allocated_gib" in row else "-"
                mfu = f"{row['mfu']:.1%}" if "mfu" in row else "-"
                seconds = f"{row['seconds']:.2f} s ({row['least_s']:.2f}-{row['most_s']:.2f})"
                lines.append(f"  {kind:9} {seconds:24} {row['tokens_per_s']:9.0f} tokens/s  MFU {mfu:6} peak {memory}")
        if "gain" in case:
            names = ("gradient_shared", "gradient_other_microbatches", "gradient_repetition", "ratio")
            lines.append(
                f"  gain {case['gain']:.2f}; " + ", ".join(f"{n} {case[n]:.2e}" for n in names if case.get(n) is not None)
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
