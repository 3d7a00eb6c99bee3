"""Seconds that the promises cost per step: golden check, canary, digests, manifest, beside the seconds of the step.

    .venv/bin/python tests/drills/promise_costs.py WORKSPACE RUN

Reads what the steps of a run left in their folders (`promises.json`, `report.json`); any run will do. The trainer program's own check
of the adapter that it goes on from is part of its time, `time/train_adapter_s`, and is not counted here.
"""

import json
import sys
from pathlib import Path

KINDS = ("golden check", "canary", "digests", "digests of code", "manifest")


def main(workspace: Path, run: str) -> str:
    steps = [step for step in sorted((workspace / "runs" / run / "steps").glob("[0-9]*")) if (step / "promises.json").exists()]
    if not steps:
        raise SystemExit(f"no step of run {run!r} in {workspace} says what its promises cost (promises.json)")
    lines = ["| step | " + " | ".join(KINDS) + " | together | step | share |", "|--:|" + "--:|" * (len(KINDS) + 3)]
    for step in steps:
        spent = json.loads((step / "promises.json").read_bytes())
        metrics = json.loads((step / "report.json").read_bytes())["metrics"]
        whole, total = metrics["time/step_s"] + metrics["time/overhead_s"], sum(spent.values())
        figures = " | ".join(f"{spent.get(kind, 0.0):.3f}" for kind in KINDS)
        lines.append(f"| {int(step.name)} | {figures} | {total:.3f} | {whole:.1f} | {100 * total / whole:.2f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2]))
