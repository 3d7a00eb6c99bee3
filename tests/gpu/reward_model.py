"""A reward model on a GPU, by its program: speed, memory, equal bits, and how far its scores are from float32.

    python tests/gpu/reward_model.py OUT.json MODEL [--shape qwen2.5-0.5b] [--samples 512] [--tokens 400] [--device cpu]

Makes a model for sequence classification with random weights in MODEL if there is none. The last line is "done", or what was wrong.
"""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from random_model import COMMON, SHAPES
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from infra.concurrency.deadline import NO_DEADLINE
from infra.config import RewardConfig, RewardModelConfig
from infra.machine import nvml
from infra.rewards.models import scorer, scoring
from infra.rewards.models.batches import batches_of
from infra.rewards.outcome import Outcome
from infra.store.files import write_json
from infra.tiny_model.tokenizer import train_tokenizer

NUM_COMPARED = 64


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("model", type=Path)
    p.add_argument(
        "--shape", default="qwen2.5-0.5b", choices=[name for name in SHAPES if "moe" not in name and "a3b" not in name]
    )
    p.add_argument("--samples", type=int, default=512)
    p.add_argument("--tokens", type=int, default=400)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = p.parse_args()
    make(options.shape, options.model)
    model = RewardModelConfig(path=str(options.model), device=options.device, dtype="bfloat16", max_tokens=4096)
    config = RewardConfig(name="reward_model", model=model)
    rows = random_rows(options.samples, options.tokens)
    used = used_gib()
    first, seconds = scored(config, rows)
    figures: dict[str, Any] = {"samples": len(rows), "tokens": sum(map(len, rows)), "with_load_s": seconds}
    figures |= {"gpu_gib_before": used, "gpu_gib_after": used_gib()}
    again, figures["again_s"] = scored(config, rows)
    num_batches = len(batches_of([len(row) for row in rows], model.max_tokens_per_batch))
    killed, figures["killed_s"] = scored(config, rows, kills_at=(num_batches + 1) // 2)
    figures |= {
        "again_equal": again == first,
        "killed_equal": killed == first,
        "against_float32": against_float32(options, rows, first),
    }
    figures |= loaded(config, rows)
    write_json(options.out, figures)
    print(figures)
    print("done" if figures["again_equal"] and figures["killed_equal"] else "FAILED: equal scorings differ")


def make(shape: str, folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    tokenizer = train_tokenizer()
    sizes = COMMON | SHAPES[shape] | {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(Qwen2Config(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_rows(num: int, num_tokens: int) -> list[list[int]]:
    """Rows of half of num_tokens to all of them."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(num_tokens // 2, num_tokens + 1, (num,), generator=generator).tolist()
    return [torch.randint(8, 500, (length,), generator=generator).tolist() for length in lengths]


def scored(config: RewardConfig, rows: list[list[int]], kills_at: int | None = None) -> tuple[list[float | None], float]:
    """Score rows; kills_at: number of the batch before which the program is killed."""
    found: dict[int, Outcome] = {}
    ask, num_asked, begin = scorer.ScorerProgram.ask, 0, time.monotonic()

    def struck(program: scorer.ScorerProgram, *arguments: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked == kills_at:
            os.kill(program._process.pid, signal.SIGKILL)
        return ask(program, *arguments)

    scorer.ScorerProgram.ask = struck  # type: ignore[method-assign]
    try:
        scoring.judge(config, rows, (), found.__setitem__, NO_DEADLINE)
    finally:
        scorer.ScorerProgram.ask = ask  # type: ignore[method-assign]
    return [found[position].reward for position in range(len(rows))], time.monotonic() - begin


def loaded(config: RewardConfig, rows: list[list[int]]) -> dict[str, float]:
    """Seconds of the load and of all batches without it, and the GPU's memory meanwhile."""
    begin = time.monotonic()
    program = scorer.opened(config)
    load_s, begin = time.monotonic() - begin, time.monotonic()
    for batch in batches_of([len(row) for row in rows], config.model.max_tokens_per_batch):
        program.ask([rows[position] for position in batch], config.timeout_s)
    batches_s, used = time.monotonic() - begin, used_gib()
    begin = time.monotonic()
    scorer.close_all()
    return {
        "load_s": load_s,
        "batches_s": batches_s,
        "gpu_gib_loaded": used,
        "end_s": time.monotonic() - begin,
        "gpu_gib_ended": used_gib(),
    }


def against_float32(options: argparse.Namespace, rows: list[list[int]], found: list[float | None]) -> dict[str, float]:
    """Differences from transformers called directly, each row alone, in float32."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(options.model, dtype=torch.float32).to(options.device).eval()
    with torch.inference_mode():
        exact = [float(model(input_ids=torch.tensor([row], device=options.device)).logits[0, 0]) for row in rows[:NUM_COMPARED]]
    apart = [abs(value - float(score or 0)) for value, score in zip(exact, found, strict=False)]
    return {"largest": max(apart), "mean": sum(apart) / len(apart), "spread_of_scores": float(torch.tensor(exact).std())}


def used_gib() -> float:
    return sum(gpu.used_bytes for gpu in nvml.read().gpus) / 2**30


if __name__ == "__main__":
    main()
