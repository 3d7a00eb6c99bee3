"""Does it learn? The preset `arithmetic` with several seeds, and a control whose rewards are shuffled: curves and a table.

python -m flows.learning_curves                 makes the runs that are missing (minutes each), then the page and the picture
python -m flows.learning_curves --only-draw     from the runs that are there

Writes docs/results/learning.md and docs/images/learning.png. Needs matplotlib (extra `notebooks`).
"""

import argparse
import platform
import time
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil

from flows.presets import arithmetic
from infra import evaluations
from infra.config import RunConfig
from infra.files import read_json, run_folder, write, write_json
from infra.settings import CHECKOUT

SEEDS = (0, 1, 2)
CONTROL = "learning-control"
PAGE, PICTURE = CHECKOUT / "docs/results/learning.md", CHECKOUT / "docs/images/learning.png"
COMMAND = "python -m flows.learning_curves"


class Curves(NamedTuple):
    name: str
    rewards: list[float]
    """Mean reward by step."""
    scores: dict[int, float]
    """Held-out pass@1 by adapter version: greedy answers."""
    sampled: dict[int, float]
    """The same for answers sampled at temperature 1, as rollouts are."""
    seconds: float | None
    """Of the whole run, evaluations included; None where it was interrupted and went on."""


def configs() -> list[RunConfig]:
    """A trainer that stays up between steps makes a step on two cores five times faster; the result is the same."""
    base = arithmetic()
    base = base.but(trainer=base.trainer.but(life="resident"))
    learning = [base.but(name=f"learning-{seed}", seed=seed) for seed in SEEDS]
    control = base.but(name=CONTROL, reward=base.reward.but(shuffle_seed=0))
    return [*learning, control]


def make(config: RunConfig) -> None:
    from flows.run import rl_run  # here, so that drawing needs no Prefect

    fresh, begun = not run_folder(config.name).exists(), time.monotonic()
    rl_run(config)
    if fresh:
        write_json(run_folder(config.name) / "seconds.json", time.monotonic() - begun)


def curves_of(config: RunConfig) -> Curves:
    folder = run_folder(config.name)
    reports = [read_json(path) for path in sorted(folder.glob("steps/*/report.json"))]
    duration, held = folder / "seconds.json", evaluations.of_run(config.name, config.exam)
    return Curves(
        name=config.name,
        rewards=[report["metrics"]["reward/mean"] for report in reports],
        scores={each.step: each.pass_at_1 for each in held},
        sampled={each.step: each.pass_at_k["1"] for each in held},
        seconds=read_json(duration) if duration.exists() else None,
    )


def row_of(curves: Curves) -> str:
    first, last = min(curves.scores), max(curves.scores)
    minutes = "" if curves.seconds is None else f"{curves.seconds / 60:.1f}"
    scores = " | ".join(f"{found[first]:.3f} | {found[last]:.3f}" for found in (curves.scores, curves.sampled))
    return f"| {curves.name} | {scores} | {fmean(curves.rewards[:3]):.3f} | {fmean(curves.rewards[-3:]):.3f} | {minutes} |"


def page_of(found: list[Curves], config: RunConfig) -> str:
    memory = psutil.virtual_memory().total / 2**30
    exam = config.exam
    about = (
        f"{config.num_steps} steps of {config.data.num_prompts} prompts x {config.sampling.group_size} samples, learning rate "
        f"{config.trainer.learning_rate:g}, {config.trainer.num_minibatches} optimizer steps each; {exam.data.num_prompts} held-out questions, "
        f"none of them in the training set, one greedy and {exam.num_samples} sampled answers to each."
    )
    rows = "\n".join(row_of(curves) for curves in found)
    return f"""# It learns

Preset `arithmetic`: the warm-started tiny model on generated word problems. {about}
`{CONTROL}` is the same with the rewards of each step permuted among its samples (`reward.shuffle_seed`): its mean reward says how good
the policy is, and its updates have nothing to learn from.

```
{COMMAND}
```

Machine: {psutil.cpu_count()} CPU cores ({platform.machine()}), {memory:.0f} GiB, shared with other work; Python {platform.python_version()}.

| run | greedy pass@1 before | after | sampled pass@1 before | after | mean reward, first 3 steps | last 3 steps | minutes |
|--|--:|--:|--:|--:|--:|--:|--:|
{rows}

![Learning curves](../images/learning.png)
"""


def draw(found: list[Curves], path: Path) -> None:
    """Reward by step (mean of three steps) and held-out pass@1 by adapter version; learning runs in blue, the control in grey."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    shades = iter(("#1f4e9c", "#3f7fd1", "#7fb0ee"))
    for curves in found:
        style: dict[str, Any] = (
            {"color": "#888888", "linestyle": "--"} if curves.name == CONTROL else {"color": next(shades, "#1f4e9c")}
        )
        smooth = [fmean(curves.rewards[max(0, step - 1) : step + 2]) for step in range(len(curves.rewards))]
        axes[0].plot(curves.rewards, alpha=0.25, **style)
        axes[0].plot(smooth, label=curves.name, **style)
        for axis, scores in ((axes[1], curves.sampled), (axes[2], curves.scores)):
            axis.plot(list(scores), list(scores.values()), marker="o", label=curves.name, **style)
    axes[0].set(title="mean reward (faint: each step; line: mean of three)", xlabel="step")
    axes[1].set(title="held-out pass@1, sampled", xlabel="adapter version")
    axes[2].set(title="held-out pass@1, greedy", xlabel="adapter version")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    write(path, buffer.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Make the runs that are missing, then the page and the picture.")
    parser.add_argument("--only-draw", action="store_true", help="make no run")
    options = parser.parse_args()
    if not options.only_draw:
        from flows.command_line import with_prefect

        with with_prefect():
            for config in configs():
                make(config)
    found = [curves_of(config) for config in configs()]
    write(PAGE, page_of(found, configs()[0]).encode())
    draw(found, PICTURE)


if __name__ == "__main__":
    main()
