"""Does it learn in turns? Curves and figures of the preset `calculator` with three seeds, and of a control with shuffled rewards.

    python tests/benches/agents.py FOLDER       a folder of runs: see RUNS

Writes docs/images/agents.png and docs/results/agents.json; the runs are made with `ratchet run`. Needs matplotlib (extra `notebooks`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from count_turns import COUNTS, counted

ROOT = Path(__file__).resolve().parents[2]
BLUE, GREY = "#1f5fbf", "#7a7a7a"
PANELS = {"reward/mean": "pass rate of the step's episodes", "episodes/mean_turns": "turns of an episode"}


OF_OTHERS = ("prefix_mismatches", "gateway_overhead_frac")
"""Figures in agents.json that other measurements gave."""
LEARNING = tuple(f"learning-calculator-{name}" for name in ("0", "1", "2", "control"))
RUNS = {"ChatML": (*LEARNING, "learning-digits"), "Llama 3.1": ("turns-llama",)}
"""Family of the chat template -> runs whose turns are counted."""


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_bytes())["metrics"] for path in sorted(run.glob("steps/[0-9]*/report.json"))]


def evaluations_of(run: Path) -> dict[int, dict[str, Any]]:
    records = (json.loads(path.read_bytes())["record"] for path in run.glob("evaluations/*/evaluation.json"))
    return {record["step"]: record for record in records}


def draw(runs: list[Path], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, 4), constrained_layout=True)
    for axis, (metric, title) in zip(axes, PANELS.items(), strict=True):
        for run in runs:
            is_control = run.name.endswith("control")
            values = [step[metric] for step in metrics_of(run)]
            axis.plot(values, color=GREY if is_control else BLUE, label="control" if is_control else "seed", linewidth=1.6)
        axis.set_title(title)
        axis.set_xlabel("RL steps taken")
        axis.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(dict(zip(labels, handles, strict=True)).values(), ("three seeds", "rewards shuffled"), frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    folder = Path(sys.argv[1])
    of_family = {family: counted([folder / name for name in names]) for family, names in RUNS.items()}
    total = {name: sum(counts[name] for counts in of_family.values()) for name in COUNTS}
    runs = [folder / name for name in LEARNING]
    learnt = {
        run.name: {
            "pass_at_1": [record["pass_at_1"] for _, record in sorted(evaluations_of(run).items())],
            "mean_turns": [record["mean_turns"] for _, record in sorted(evaluations_of(run).items())],
            "reward": [round(step["reward/mean"], 4) for step in metrics_of(run)],
            "step_s": round(sum(step["time/step_s"] for step in metrics_of(run)), 1),
        }
        for run in [*runs, folder / "learning-digits"]
    }
    path = ROOT / "docs/results/agents.json"
    measured = {name: value for name, value in json.loads(path.read_text()).items() if name in OF_OTHERS}
    path.write_text(json.dumps(total | measured | {"of_family": of_family, "learning": learnt}, indent=1) + "\n")
    draw(runs, ROOT / "docs/images/agents.png")


if __name__ == "__main__":
    main()
