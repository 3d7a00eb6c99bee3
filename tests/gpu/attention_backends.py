"""Attention of the trainer by torch's kernel and by flash-attn-4, in turns in one process: attention alone, and steps of the trainer.

    python tests/gpu/attention_backends.py OUT.json [--alone] [--shape qwen2.5-0.5b] [--prompts 64] [--microbatch 4608 13824] [--repeat 3]
        [--rank 16] [--ways flash-attn-4]

The checkout and this folder on PYTHONPATH, flash-attn-4 installed (docs/trainer.md), a Hopper GPU. --alone: three groups of 8 answers with a
prompt in common, 512 + 512 tokens, for the heads of three models; milliseconds of the forward pass and of both, and how far output and
gradients of one are from the other's, by their norm. --shape: prompts x 8 samples of 512 + 512 tokens, random weights, prompts once per
group; flash-attn-4 is used at every size here, also below FEWEST_ROWS. The first step of each way and size is left out.
--small: a CPU, where both ways are the same, to see that it works.
"""

import argparse
import contextlib
import gc
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from infra.trainers.torchrun import ALLOCATOR

# As the trainer's programs have it; before torch looks.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)

import torch
from torch import Tensor

from infra.megatron.model import attention, parallel
from infra.store.files import write_json

sys.path.insert(0, str(Path(__file__).parent))
import prompts_once

HEADS = {"qwen2.5-7b": (28, 4, 128), "qwen2.5-0.5b": (14, 2, 64), "qwen3-30b-a3b": (32, 4, 128)}
"""Queries, keys, size of a head."""
WAYS = (attention.VARLEN, attention.FLASH_4)
OWN, SEEN = ([511] + [512] * 8) * 3, ([511] + [1023] * 8) * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=prompts_once.SHAPES)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--microbatch", type=int, nargs="+", default=[13824])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--small", action="store_true")
    o = parser.parse_args()
    device = torch.device("cpu" if o.small else "cuda")
    found: dict[str, Any] = {"command": sys.argv, "torch": torch.__version__, "alone": {}, "steps": []}
    found["gpu"] = "CPU" if o.small else torch.cuda.get_device_name()
    if o.alone:
        found["alone"] = {name: alone(name, device) for name in HEADS}
        write_json(o.out, found)
    if o.shape or o.small:
        steps(o, found)
    write_json(o.out, found)


def only(way: str) -> contextlib.AbstractContextManager[Any]:
    """torch's kernel, as if flash-attn-4 were not installed, or flash-attn-4 for any number of rows."""
    return every_size() if way == attention.FLASH_4 else mock.patch.object(attention, "_flash_4", lambda: None)


@contextlib.contextmanager
def every_size() -> Iterator[None]:
    whole = attention.backend
    with mock.patch.object(attention, "backend", lambda device, dtype, head_dim, num_rows=0: whole(device, dtype, head_dim)):
        yield


def alone(name: str, device: torch.device) -> dict[str, Any]:
    """Milliseconds of one layer's attention by both, and their distance."""
    num_heads, num_kv_heads, size = HEADS[name]
    attention.check(device, torch.bfloat16, num_heads, num_kv_heads, size)
    packed = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, *OWN], device=device).cumsum(0).int(),
        cu_seqlens_kv=torch.tensor([0, *SEEN], device=device).cumsum(0).int(),
        max_seqlen_q=max(OWN),
        max_seqlen_kv=max(SEEN),
    )
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((sum(OWN), num_heads), (sum(SEEN), num_kv_heads), (sum(SEEN), num_kv_heads), (sum(OWN), num_heads))
    *inputs, upstream = (torch.randn(*each, size, generator=generator, device=device).bfloat16() for each in sizes)
    entry: dict[str, Any] = {}
    results: dict[str, list[Tensor]] = {}
    for way in WAYS:

        def both(way: str = way) -> list[Tensor]:
            query, key, value = (x.detach().requires_grad_() for x in inputs)
            output = attention.ATTEND[way](query, key, value, packed, size**-0.5)
            return [output.detach(), *torch.autograd.grad(output, (query, key, value), upstream)]

        def forward(way: str = way) -> Tensor:
            query, key, value = inputs
            with torch.no_grad():
                return attention.ATTEND[way](query, key, value, packed, size**-0.5)

        results[way] = both()
        entry[way] = {"forward_ms": milliseconds(forward), "both_ms": milliseconds(both)}
    entry["distance"] = [prompts_once.distance(a, b) for a, b in zip(*results.values(), strict=True)]
    print(name, entry, flush=True)
    return entry


def milliseconds(function: Any, repeat: int = 20) -> float:
    function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()  # type: ignore[no-untyped-call]  # torch
    for _ in range(repeat):
        function()
    end.record()  # type: ignore[no-untyped-call]  # torch
    end.synchronize()
    return begin.elapsed_time(end) / repeat


def steps(o: argparse.Namespace, found: dict[str, Any]) -> None:
    name = "small" if o.small else o.shape
    shape = prompts_once.SHAPES[name] if o.small else prompts_once.Shape(o.prompts, 8, 512, 512, 0)
    prompts_once.RANK = o.rank
    job = prompts_once.make_job(o, "cpu" if o.small else "cuda")
    layout = parallel.start(job)
    a, net, shards, adam = prompts_once.make_model(name, job.trainer, layout)
    batch = prompts_once.make_batch(shape, a.vocab_size)
    gc.collect()
    gc.freeze()  # as the persistent trainer does
    for turn in range(o.repeat + 1):
        for size in o.microbatch:
            for way in o.ways:
                trainer = job.trainer.but(max_tokens_per_microbatch=size)
                with only(way):
                    step = prompts_once.timed(net, shards, adam, batch, trainer, layout)
                step |= prompts_once.figures(a, trainer, batch, batch, step["seconds"]) | {"way": way}
                print(
                    {"warm-up": not turn} | {k: round(v, 4) if isinstance(v, float) else v for k, v in step.items()}, flush=True
                )
                if turn:
                    found["steps"].append(step)
                    write_json(o.out, found)
    for size in o.microbatch:
        for way in o.ways:
            same = [step for step in found["steps"] if (step["microbatch"], step["way"]) == (size, way)]
            seconds = [step["seconds"] for step in same]
            share = f"  MFU {statistics.median(step['mfu'] for step in same):.1%}" if "mfu" in same[0] else ""
            print(
                f"{size} {way}: {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}){share}", flush=True
            )
    parallel.stop()


if __name__ == "__main__":
    main()
