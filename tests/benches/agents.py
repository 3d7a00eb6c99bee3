"""Does it learn in turns? Curves and figures of the presets that play episodes: `calculator` with three seeds, and one or more of the others.

    python tests/benches/agents.py FOLDER       a folder of runs: those of FAMILY_OF that are in it; the figures of the others stay as they are

Writes docs/results/agents.json, docs/images/agents-presets.png from it, and docs/images/agents.png where its runs are there. The runs are made
with `ratchet run`. Needs matplotlib (extra `notebooks`).
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
PRESETS = {
    "tools": ("learning-tools",),
    "program": ("learning-program",),
    "calculator-taskset": ("learning-taskset",),
    "digits": tuple(f"learning-digits-{name}" for name in ("0", "1", "2", "control")),
}
"""Preset -> its runs."""
CHATML = (*LEARNING, "learning-digits", *(run for runs in PRESETS.values() for run in runs))
FAMILY_OF = dict.fromkeys(CHATML, "ChatML") | {"turns-llama": "Llama 3.1", "turns-qwen3": "Qwen3"}
"""Run -> family of the chat template."""

Counts = dict[str, Any]


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_bytes())["metrics"] for path in sorted(run.glob("steps/[0-9]*/report.json"))]


def evaluations_of(run: Path) -> dict[int, dict[str, Any]]:
    records = (json.loads(path.read_bytes())["record"] for path in run.glob("evaluations/*/evaluation.json"))
    return {record["step"]: record for record in records}


def merged(known: dict[str, Counts], found: dict[str, Counts]) -> dict[str, Counts]:
    """Counts by run. An entry of several runs, named by all of them, stays until all of them are found."""
    return {names: counts for names, counts in known.items() if not set(names.split()) <= found.keys()} | found


def summed(of_runs: dict[str, Counts]) -> Counts:
    """All runs together, and each family."""
    families = sorted({counts["family"] for counts in of_runs.values()})
    of_family = {
        family: {name: sum(counts.get(name, 0) for counts in of_runs.values() if counts["family"] == family) for name in COUNTS}
        for family in families
    }
    return {name: sum(counts[name] for counts in of_family.values()) for name in COUNTS} | {"of_family": of_family}


def learnt_by(run: Path) -> dict[str, Any]:
    evaluations = [record for _, record in sorted(evaluations_of(run).items())]
    return {
        "pass_at_1": [record["pass_at_1"] for record in evaluations],
        "mean_turns": [record["mean_turns"] for record in evaluations],
        "greedy_reward": [record["mean_reward"] for record in evaluations],
        "reward": [round(step["reward/mean"], 4) for step in metrics_of(run)],
        "step_s": round(sum(step["time/step_s"] for step in metrics_of(run)), 1),
    }


def draw(runs: list[Path], path: Path) -> None:
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


def draw_presets(learnt: dict[str, Any], path: Path) -> None:
    """Mean reward of the step's episodes, a panel for each preset; a control is grey."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PRESETS), figsize=(3 * len(PRESETS), 3), constrained_layout=True, squeeze=False)
    for axis, (preset, runs) in zip(axes[0], PRESETS.items(), strict=True):
        for run in runs:
            axis.plot(learnt[run]["reward"], color=GREY if run.endswith("control") else BLUE, linewidth=1.6)
        axis.set_title(preset)
        axis.set_xlabel("RL steps taken")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("mean reward of an episode")
    figure.savefig(path, dpi=110)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    folder = Path(sys.argv[1])
    runs = [folder / name for name in FAMILY_OF if (folder / name).exists()]
    path = ROOT / "docs/results/agents.json"
    known = json.loads(path.read_text())
    of_runs = merged(known["of_runs"], {run.name: {"family": FAMILY_OF[run.name]} | counted([run]) for run in runs})
    learnt = known["learning"] | {run.name: learnt_by(run) for run in runs if run.name.startswith("learning-")}
    others = {name: known[name] for name in OF_OTHERS}
    path.write_text(json.dumps(summed(of_runs) | others | {"of_runs": of_runs, "learning": learnt}, indent=1) + "\n")
    names = {run.name for run in runs}
    if set(LEARNING) <= names:
        draw([folder / name for name in LEARNING], ROOT / "docs/images/agents.png")
    draw_presets(learnt, ROOT / "docs/images/agents-presets.png")


if __name__ == "__main__":
    main()
