"""Cells of runs with in-flight updates: the rollout of step 1 is struck where it goes on with adapter 1. Three steps, `max_staleness` 1.

in flight            each answer has two tokens of either adapter, so the adapters are those of an undisturbed run
in flight by time    engine.deterministic is off: the switch comes with the adapter, and half of the requests are under way then
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cell import Running

    from infra.store.samples import Sample

AWAITING, SWITCHED, LOADED = "switch.awaiting", "switch.switched", "switch.loaded"
"""Adapter 0 has sampled its part, and nothing of what it began is in a file; prefixes are in the journal, whose key names adapter 1; the engine
serves adapter 1, and has continued no prefix."""
POINTS = (AWAITING, SWITCHED, LOADED)
BY_TIME = "in flight by time"
VARIANTS = ("in flight", BY_TIME)
NUM_STEPS = 3
MAX_TOKENS = 4
CORRECTION = {"mode": "decoupled", "kind": "tis", "max_staleness": 1, "in_flight_updates": True}
IN_FLIGHT: dict[tuple[str, str], tuple[str, ...]] = {
    **{(target, fault): POINTS for target in ("engine", "flow") for fault in ("SIGKILL", "SIGTERM", "hang")},
    ("flow", "exit 1"): POINTS,
    ("engine", "garbage"): (AWAITING, LOADED),
}


def after(running: "Running", problems: list[str]) -> None:
    """Every token has the log-probability that the adapter on record gives it, and only a step's own adapters have sampled for it."""
    run = running.workspace / "runs" / running.run
    num_older = []
    for step in range(NUM_STEPS):
        for sample in _samples_of(run, step):
            num_older.append(sample.num_older_tokens)
            problems += [f"step {step}, prompt {sample.prompt_id}: {problem}" for problem in _problems_of(sample, step, run)]
    size = len(num_older) // NUM_STEPS
    if running.cell.variant != BY_TIME and num_older != [0] * size + [MAX_TOKENS // 2] * (len(num_older) - size):
        problems.append(f"{num_older} tokens of the samples are older, not half of each from step 1 on")
    if running.cell.point == "undisturbed" and not any(0 < count < MAX_TOKENS for count in num_older):
        problems.append("no sample has tokens of two adapters")


def _samples_of(run: Path, step: int) -> "list[Sample]":
    from infra.store.samples import read_samples

    return read_samples(run / f"steps/{step:06d}/samples.parquet")


def _problems_of(sample: "Sample", step: int, run: Path) -> list[str]:
    from twin_engine import logprob

    version, num_older = sample.adapter_version, sample.num_older_tokens
    older = _bytes_of(run, version - 1) if num_older else ""
    problems = []
    if not max(0, step - 1) <= version <= step or (num_older and version != step):
        problems.append(f"adapter {version} has sampled, {num_older} tokens by the one before")
    if num_older and sample.older_adapter_sha256 != _recorded(run, version - 1):
        problems.append(f"its older tokens are said to be adapter {sample.older_adapter_sha256[:8]}'s")
    tokens, newer = [int(token) for token in sample.prompt_tokens], _bytes_of(run, version)
    for number, (token, value) in enumerate(zip(map(int, sample.output_tokens), sample.output_logprobs, strict=True)):
        by = older if number < num_older else newer
        if abs(value - logprob(tokens, by)) > 1e-6:
            problems.append(f"token {number} is not of the adapter on record")
        tokens.append(token)
    return problems


def _bytes_of(run: Path, version: int) -> str:
    """As the twin of the engine names it."""
    path = run / f"adapters/{version:06d}/adapter_model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if version else "base"


def _recorded(run: Path, version: int) -> str:
    """Digest of an adapter, as the samples of the step of its own have it."""
    if version:
        weights: str = json.loads((run / f"steps/{version - 1:06d}/report.json").read_bytes())["adapter"]["weights"]["sha256"]
        return weights
    return _samples_of(run, 0)[0].adapter_sha256
