"""What a step of the trainer takes by shape: peak memory and seconds, the points that the forecast is fitted to. One GPU, one call.

    python tests/gpu/forecast.py OUT.json [--cases NAME ...] [--repeat 2] [--limit-s 330]

The checkout and this folder on PYTHONPATH. Random weights, no model files; prompts once per group, no checkpoint is written. For each case a
short step first, which compiles kernels, then `--repeat` whole ones (forward, backward, AdamW): the least seconds and the highest peak.
OUT.json is written after each case and printed at the end as one line. No case begins after `--limit-s`; those that are left out, or run out
of memory, say so. --small: a CPU, to see that it works.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from infra.trainers.torchrun import ALLOCATOR

# As the trainer's programs have it; before torch looks.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)

import json

import torch

from infra.config import TrainerConfig
from infra.megatron.model import parallel
from infra.megatron.model.parallel import ParallelContext
from infra.store.files import write_json

sys.path.insert(0, str(Path(__file__).parent))
import prompts_once
import random_model
from prompts_once import Shape


class Case(NamedTuple):
    model: str
    shape: Shape
    rank: int = 16
    recompute: bool = False
    layers: int | None = None
    """As many of the model's layers; None: all."""


CASES = {
    "0.5b": Case("qwen2.5-0.5b", Shape(32, 8, 512, 512, 16384)),
    "0.5b-preset": Case("qwen2.5-0.5b", Shape(64, 5, 150, 300, 32768), rank=32),
    "1.5b": Case("qwen2.5-1.5b", Shape(16, 8, 512, 512, 16384)),
    "3b": Case("qwen2.5-3b", Shape(16, 8, 512, 512, 9728)),
    "7b": Case("qwen2.5-7b", Shape(16, 8, 512, 512, 9728)),
    "7b-recompute": Case("qwen2.5-7b", Shape(8, 8, 512, 512, 16384), recompute=True),
    "1.5b-long": Case("qwen2.5-1.5b", Shape(4, 8, 512, 2048, 16896)),
    "moe-12-layers": Case("qwen3-30b-a3b", Shape(16, 8, 512, 512, 14336), rank=8, layers=12),
}
SMALL = {"small": Case("small", Shape(4, 3, 12, 10, 64)), "moe": Case("small-moe", Shape(4, 3, 12, 10, 64), recompute=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=330, help="no case begins later")
    parser.add_argument("--small", action="store_true")
    o = parser.parse_args()
    if not o.small and not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU here; --small tries the script out on a CPU")
    device = "cpu" if o.small else "cuda"
    job = prompts_once.make_job(o, device)
    layout = parallel.start(job)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    found: dict[str, Any] = {"command": sys.argv[1:], "gpu": gpu, "torch": torch.__version__, "cases": {}}
    end = time.monotonic() + o.limit_s
    for name, case in SMALL.items() if o.small else ((name, CASES[name]) for name in o.cases):
        if time.monotonic() > end:
            found["cases"][name] = {"left_out": "no time"}
            continue
        try:
            found["cases"][name] = measured(case, job.trainer, layout, o.repeat)
        except torch.OutOfMemoryError as error:
            found["cases"][name] = {"left_out": str(error).split(".")[0]}
        print(name, found["cases"][name], flush=True)
        write_json(o.out, found)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    parallel.stop()
    write_json(o.out, found)
    print(json.dumps(found), flush=True)


def measured(case: Case, trainer: TrainerConfig, layout: ParallelContext, repeat: int) -> dict[str, Any]:
    """A step's figures, with what it computed: rows of the batch, loss tokens, the number of micro-batches by rows."""
    shape, fields = case.shape, dict(random_model.SHAPES[case.model])
    trainer = trainer.but(lora=trainer.lora.but(rank=case.rank), recompute=case.recompute)
    trainer = trainer.but(max_tokens_per_microbatch=shape.microbatch)
    whole = random_model.SHAPES[case.model]
    random_model.SHAPES[case.model] = fields | {"num_hidden_layers": case.layers or fields["num_hidden_layers"]}
    try:
        a, net, shards, adam = prompts_once.make_model(case.model, trainer, layout)
    finally:
        random_model.SHAPES[case.model] = whole
    batch = prompts_once.make_batch(shape, a.vocab_size)
    warm = prompts_once.make_batch(shape._replace(num_prompts=min(2, shape.num_prompts)), a.vocab_size)
    prompts_once.run(net, shards, adam, warm, trainer, layout)
    steps = []
    for _ in range(repeat):
        step, _ = prompts_once.run(net, shards, adam, batch, trainer, layout)
        steps.append(step | prompts_once.figures(a, trainer, batch, batch, step["seconds"]))
    fastest = min(steps, key=lambda step: step["seconds"])
    found = {name: fastest[name] for name in ("seconds", "rows", "mfu") if name in fastest}
    found |= {name: max(step.get(name, 0.0) for step in steps) for name in ("peak_allocated_gib", "peak_reserved_gib")}
    found |= {"num_loss_tokens": int(batch.is_loss_token.sum()), "all_s": [step["seconds"] for step in steps]}
    return case._asdict() | {"shape": shape._asdict()} | found


if __name__ == "__main__":
    main()
