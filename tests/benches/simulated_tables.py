"""Tables by the simulator alone: effective training time over step lengths, and rows that NeMo-RL has published.

.venv/bin/python tests/benches/simulated_tables.py [--save OUT.json]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.simulation.forecast import simulate
from infra.simulation.scenario import Recovery, Scenario

STEP_LENGTHS_S = (30, 60, 120, 240, 480)
MEDIAN, LONGEST = Recovery(), Recovery(engine_s=163.8, trainer_s=79.6, flow_s=12.1, worker_s=9.5)
"""Seconds to recover: an engine's start at 7B on an H200 (docs/colocation.md) and medians with all parts real; the longest with all parts
real (docs/results/drill.md)."""
LONGEST_TOKENS = 4096
LLAMA = Scenario(
    gpus=8, num_steps=4, num_prompts=64, group_size=32, prompt_tokens=0, max_tokens=LONGEST_TOKENS, log_spread=0.6,
    max_running_requests=256, trainer_fixed_s=0, to_training_s=3, to_sampling_s=5,
)  # fmt: skip
"""NeMo-RL v0.3, Llama-3.1-8B on 8 H100: generation 58 s, training and log-probabilities 46 s, refit 5 s, 112 s in all."""
QWEN = LLAMA.but(gpus=32, tensor_parallel=2, log_spread=0.5, to_training_s=3.0, to_sampling_s=2.0)
"""NeMo-RL v0.6, Qwen3-30B-A3B on H100. The seconds of the hand-over are assumed."""


def solved(aim: float, value_at: Callable[[float], float], low: float, high: float) -> float:
    """Find where a function that falls as its argument grows has a value, on a scale of ratios."""
    for _ in range(25):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if value_at(middle) > aim else (low, middle)
    return low


def effective_ratio(step_s: float, num_replicas: int, recovery: Recovery) -> float:
    """Of 400 steps, about half of which is sampling, with one failure in every tenth."""
    scenario = Scenario(gpus=num_replicas, num_prompts=16, num_steps=400, failures_every=10, recovery=recovery, log_spread=0.3)

    def lasting(speed: float) -> Scenario:
        rates = {"request_tokens_per_s": 100 * speed, "replica_tokens_per_s": 1e5 * speed, "max_running_requests": 32}
        return scenario.but(**rates, trainer_tokens_per_s=131072 * speed / 10 / num_replicas)

    speed = solved(step_s, lambda speed: simulate(lasting(speed).but(failures_every=0, num_steps=20)).step_s, 0.001, 10)
    return simulate(lasting(speed)).effective_ratio


def with_mean(scenario: Scenario, tokens: float) -> Scenario:
    """The scenario whose samples, cut at the longest, have this many tokens on average."""

    def mean_at(inverse: float) -> float:
        found = simulate(scenario.but(mean_tokens=1 / inverse))
        return found.tokens_per_s * found.seconds / found.num_samples

    return scenario.but(mean_tokens=1 / solved(tokens, mean_at, 1e-5, 1e-1))


def rollout_s(scenario: Scenario) -> float:
    """Seconds of sampling in a step, where the trainer takes none."""
    return simulate(scenario.but(trainer_tokens_per_s=1e15, to_training_s=0, to_sampling_s=0)).step_s


def llama_rows() -> list[dict[str, Any]]:
    """Predict v0.4's rows on 16 GPUs from the parts of v0.3's row on 8."""
    base = with_mean(LLAMA, 795)
    rate = solved(58, lambda rate: rollout_s(base.but(replica_tokens_per_s=rate)), 1e2, 1e5)
    tokens = base.num_samples * 795
    known = base.but(gpus=16, replica_tokens_per_s=rate, trainer_tokens_per_s=tokens / (8 * 46))
    on, off = with_mean(known, 1060), with_mean(known, 1129).but(trainer_gpus=8, max_staleness=1)
    return [row("Llama-3.1-8B, on-policy, 16", on, 97.7), row("Llama-3.1-8B, 1-step off, 8 + 8", off, 74.6)]


def qwen_rows() -> list[dict[str, Any]]:
    """Fit both rates to v0.6's row with samples of a step before, engine and trainer equally fast; predict the other two rows."""
    base = with_mean(QWEN, 3203).but(trainer_gpus=16, max_staleness=1)
    hand_over_s = base.to_training_s + base.to_sampling_s
    train = base.num_samples * 3203 / (16 * (152 - hand_over_s))
    base = base.but(trainer_tokens_per_s=train)
    rate = solved(153, lambda rate: simulate(base.but(replica_tokens_per_s=rate)).step_s, 1e3, 1e5)
    fitted = base.but(replica_tokens_per_s=rate)
    wide = fitted.but(gpus=192, trainer_gpus=96, max_staleness=8, num_steps=12)
    return [
        row("Qwen3-30B-A3B, 1-step off, 16 + 16 (fitted)", fitted, 152),
        row("Qwen3-30B-A3B, on-policy, 32", fitted.but(trainer_gpus=0, max_staleness=0), 192),
        row("Qwen3-30B-A3B, 8-step off, 96 + 96", wide, 34.5),
    ]


def row(name: str, scenario: Scenario, published_s: float) -> dict[str, Any]:
    found = simulate(scenario)
    about = {"idle": found.gpu_idle_share, "staleness": found.mean_staleness, "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu}
    return {"row": name, "published_s": published_s, "simulated_s": found.step_s, "off": found.step_s / published_s - 1} | about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--save", type=Path, help="write the figures here")
    options = parser.parse_args()
    curve = [
        {"step_s": step_s, "replicas": num, "recovery": name, "effective_ratio": effective_ratio(step_s, num, recovery)}
        for name, recovery in (("median", MEDIAN), ("longest", LONGEST))
        for num in (1, 2)
        for step_s in STEP_LENGTHS_S
    ]
    text = json.dumps({"effective_training_time": curve, "published": llama_rows() + qwen_rows()}, indent=1)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
