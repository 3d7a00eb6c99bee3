"""Cells of a trainer that computes with the experts of the real engine (trainer.share_experts), struck after its last backward pass and before
it looks at their sums.

engine SIGKILL    the trainer's program ends too; a fresh one reads the model's files
rank 0 SIGKILL    a fresh trainer maps the living engine's memory
flow SIGKILL      the next attempt goes on with the trainer and the engine that live
engine garbage    one bit of the engine's experts changes: no adapter is made until the user has ended this engine
"""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strike

from infra.config import ATTENTION, RewardConfig, RunConfig

if TYPE_CHECKING:
    from cell import Running

VARIANT = "shared experts"
REWARD = Path(__file__).parents[1] / "gpu/mechanical_reward.py"
ENDED_S = 20.0
MAPPED, READ = "experts: those of the engine's process", "experts: read from"
BYTE = 4096
"""Whose lowest bit changes: of the first layer's first expert."""


def of_run(variant: str) -> dict[str, dict[str, Any]]:
    """Fields by section that such a run needs besides. One request at a time: a mixture's numbers depend on who is beside it in a batch."""
    if variant != VARIANT:
        return {}
    trainer = {"num_processes": 1, "mode": "persistent", "share_experts": True, "timeout_s": 240}
    return {"engine": {"max_running_requests": 1}, "trainer": {**trainer, "lora": {"target_modules": ATTENTION}}}


def with_reward(config: RunConfig) -> RunConfig:
    """Rewards that differ from sample to sample, or the experts would decide nothing of the adapter."""
    return config.but(reward=RewardConfig(name=f"{REWARD}:reward"))


def damage(running: "Running") -> None:
    """Change the engine's memory; the user ends this engine when the attempt has failed."""
    path = _note(running)
    first = next(iter(json.loads(path.read_bytes())["stacks"].values()))
    with path.with_name(first["file"]).open("r+b") as file:
        file.seek(BYTE)
        value = file.read(1)
        file.seek(BYTE)
        file.write(bytes([value[0] ^ 1]))
    running.restore = (math.inf, lambda: _end_engine(running))


def await_end_of_lender(running: "Running") -> None:
    """SGLang's schedulers end with their server, a moment later. They overwrite the mark in their environment with their title."""
    from infra.megatron.protocol.shared_experts import of_living_engine

    deadline = time.monotonic() + ENDED_S
    while lender := of_living_engine(_note(running)):
        if time.monotonic() > deadline:
            raise LookupError(f"process {lender.process.pid}, which holds the experts, outlives its server")
        time.sleep(0.02)


def after(running: "Running", problems: list[str]) -> None:
    """Whose experts the step was made with."""
    log = (running.manifest.parent / "train/trainer.log").read_text()
    expected = {"engine SIGKILL": READ, "rank 0 SIGKILL": MAPPED, "nobody none": MAPPED}
    wanted = expected.get(f"{running.cell.target} {running.cell.fault}")
    if wanted and (wanted not in log or (READ in log) != (wanted == READ)):
        problems.append(f"{running.manifest.parent}/train/trainer.log does not say {wanted!r} alone of the last program")


def _end_engine(running: "Running") -> None:
    running.restore = None
    if found := list((running.workspace / "runs" / running.run / "adapters").glob("*")):
        raise LookupError(f"experts that changed made {found[0]}")
    if engine := strike.find(running.folder, "engine"):
        strike.send(engine, "SIGKILL")
        await_end_of_lender(running)


def _note(running: "Running") -> Path:
    return running.workspace / "experts/experts.json"
