"""A run's engine and a second model that judges, in turns on one GPU: memory by the driver and seconds at each phase, and equal answers.

    python tests/gpu/colocated_judge.py OUT.json MODEL JUDGE [--rounds 3] [--requests 512] [--plan offload] [--flags JSON] [--small]

Makes models with random weights of the 0.5B and the 1.5B shape in MODEL and JUDGE where there are none. --small tries it out on a CPU with
small ones; its figures say nothing. The last line is "done", or what was wrong.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from random_model import make

from infra.colocation.judge_section import server_of
from infra.config import EngineConfig, JudgeConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine, open_judge, stop_recorded
from infra.engines.interface import RolloutRequest
from infra.machine import devices, nvml
from infra.models import base_model
from infra.records import AdapterVersion
from infra.rewards.judges.cases import JudgeAnswer, JudgeAway, JudgeRequest
from infra.store.files import open_workspace, write_json
from tasks.rewards.by_judge_server import judge_awake, version_of

SHAPES = {False: ("qwen2.5-0.5b", "qwen2.5-1.5b"), True: ("small", "small")}


class Phases:
    """Rows of what was done: seconds, and the memory in use afterwards."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def done(self, name: str, begin: float) -> None:
        row = {"phase": name, "seconds": round(time.monotonic() - begin, 2), "gpu_gib": round(used_gib(), 2)}
        self.rows.append(row)
        print(row, flush=True)

    def gib(self, name: str) -> list[float]:
        return [row["gpu_gib"] for row in self.rows if row["phase"] == name]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("model", type=Path)
    p.add_argument("judge", type=Path)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--requests", type=int, default=512)
    p.add_argument("--plan", default="offload", choices=("offload", "reload", "restart"))
    p.add_argument("--flags", type=json.loads, default=[], help="of both servers, as JSON: what engine.extra_flags has")
    p.add_argument("--small", action="store_true")
    o = p.parse_args()
    if o.small:
        o.rounds, o.requests = 2, 6
    elif not devices.num_gpus():
        sys.exit("no NVIDIA GPU here; --small tries the script out on a CPU")
    open_workspace()
    for folder, shape in zip((o.model, o.judge), SHAPES[o.small], strict=True):
        if not (folder / "config.json").exists():
            make(shape, folder, devices.device())
    phases, answers = Phases(), []
    try:
        for _ in range(o.rounds):
            answers.append(one_round(o, phases))
    finally:
        begin = time.monotonic()
        stop_recorded()
        phases.done("all ended", begin)
    problems = wrong(o, phases, answers)
    write_json(o.out, {"device": devices.processor(), "plan": o.plan, "phases": phases.rows, "problems": problems})
    print("; ".join(problems) if problems else "done")


def one_round(o: argparse.Namespace, phases: Phases) -> list[str]:
    """Judge asleep, rollout, engine released, judgements, judge released: the GPU is the trainer's then."""
    flags = {"extra_flags": o.flags}
    about = {"max_context_tokens": 256, "memory_fraction": 0.6, "colocation": "offload", "deterministic": o.small}
    config = EngineConfig.model_validate(about | flags)
    how = {"by": "model", "model": str(o.judge), "rubric": "{completion}", "max_output_tokens": 64, "temperature": 1.0}
    judge = JudgeConfig.model_validate(how | {"server": {"max_context_tokens": 512, "colocation": o.plan} | flags})
    base = AdapterVersion(
        run="bench", version=0, base=base_model.reference(str(o.model)), rank=8, alpha=8, target_modules=("q_proj",), seed=0
    )
    opened, engine = open_judge(server_of(config, judge), version_of(judge, "bench")), open_engine(config, base)
    begin = time.monotonic()
    if not opened.is_asleep():
        opened.start_asleep()
    phases.done("judge asleep", begin)
    begin = time.monotonic()
    engine.wake()
    engine.load_adapter(base)
    phases.done("engine awake", begin)
    begin = time.monotonic()
    prompts = [Prompt(n, n, "", "", [5 + n % 400, 6, 7, 8], n) for n in range(o.requests)]
    engine.generate(RolloutRequest(prompts, SamplingConfig(group_size=1, max_output_tokens=32), base))
    phases.done("rollout", begin)
    begin = time.monotonic()
    engine.release_memory()
    phases.done("engine released", begin)
    found: dict[int, JudgeAnswer | JudgeAway] = {}
    requests = [JudgeRequest([{"role": "user", "content": f"Grade {n}."}], None, f"{n:012x}") for n in range(o.requests)]
    begin = time.monotonic()
    with judge_awake(config, judge, "bench") as ask:
        ask(requests, found.__setitem__)
        phases.done("judged", begin)
        begin = time.monotonic()
    phases.done("judge released", begin)
    return [each.text if isinstance(each, JudgeAnswer) else each.message for _, each in sorted(found.items())]


def wrong(o: argparse.Namespace, phases: Phases, answers: list[list[str]]) -> list[str]:
    found = []
    if any(len(each) != o.requests for each in answers):
        found.append("FAILED: requests without an answer")
    if o.small and any(each != answers[0] for each in answers):  # on a GPU equal only nearly, see docs/results/deterministic.md
        found.append("FAILED: rounds have different answers")
    if not o.small:
        left, working = max(phases.gib("judge released")), min(phases.gib("judged"))
        found += (
            [f"FAILED: {left} GiB are left for the trainer to share, {working} while the judge works"]
            if left > 0.5 * working
            else []
        )
        found += ["FAILED: memory grows"] if phases.gib("judge released")[-1] > phases.gib("judge released")[0] + 0.5 else []
    return found


def used_gib() -> float:
    return sum(gpu.used_bytes for gpu in nvml.read().gpus) / 2**30


if __name__ == "__main__":
    main()
