"""Does it learn? A preset with three seeds, and a control whose rewards are shuffled: curves and a table.

python -m flows.learning_curves                 makes the runs that are missing (minutes each), then the page and the picture
python -m flows.learning_curves --only-draw     from the runs that are there

Writes docs/results/learning.md and docs/images/learning.png. Needs matplotlib (extra `notebooks`).
"""

import argparse
import platform
import time
from pathlib import Path
from statistics import fmean

import psutil

from flows.learning_picture import Curves, Point, draw
from flows.presets import preset
from infra import evaluations
from infra.config import RunConfig
from infra.files import read_json, run_folder, write, write_json
from infra.records import Evaluation
from infra.samples import Sample, read_samples
from infra.settings import CHECKOUT, settings
from infra.tiny_model.habit import is_worked_out

SEEDS = (0, 1, 2)
COMMAND = "python -m flows.learning_curves"


def configs(name: str, seeds: tuple[int, ...] = SEEDS) -> list[RunConfig]:
    """A run for each seed, then the control, which is the first of them with shuffled rewards."""
    base = preset(name)
    learning = [base.but(name=f"learning-{name}-{seed}", seed=seed) for seed in seeds]
    shuffled = base.reward.but(shuffle_seed=0)
    return [*learning, learning[0].but(name=f"learning-{name}-control", reward=shuffled)]


def make(config: RunConfig) -> None:
    from flows.run import rl_run  # here, so that drawing needs no Prefect

    fresh, begun = not run_folder(config.name).exists(), time.monotonic()
    rl_run(config)
    if fresh:
        write_json(run_folder(config.name) / "seconds.json", time.monotonic() - begun)


def point_of(held: Evaluation, pass_reward: float) -> Point:
    samples = read_samples((settings().workspace / held.file.path).with_name("sampled.parquet"))
    worked = [sample for sample in samples if is_worked_out(sample.text)]
    return Point(
        greedy=held.pass_at_1,
        sampled=held.pass_at_k["1"],
        worked=len(worked) / len(samples),
        right_when_worked=_share_right(worked, pass_reward) if worked else None,
    )


def _share_right(samples: list[Sample], pass_reward: float) -> float:
    return fmean(float((sample.reward or 0.0) >= pass_reward) for sample in samples)


def curves_of(config: RunConfig) -> Curves:
    folder = run_folder(config.name)
    reports = [read_json(path) for path in sorted(folder.glob("steps/*/report.json"))]
    duration = folder / "seconds.json"
    return Curves(
        name=config.name,
        is_control=config.reward.shuffle_seed is not None,
        rewards=[report["metrics"]["reward/mean"] for report in reports],
        points={held.step: point_of(held, config.exam.pass_reward) for held in evaluations.of_run(config.name, config.exam)},
        seconds=read_json(duration) if duration.exists() else None,
    )


def row_of(curves: Curves) -> str:
    first, last = (curves.points[choose(curves.points)] for choose in (min, max))
    cells = [curves.name]
    for before, after in zip(first, last, strict=True):
        cells.append(" -> ".join("-" if share is None else f"{share:.2f}" for share in (before, after)))
    cells.append(f"{fmean(curves.rewards[:3]):.2f} -> {fmean(curves.rewards[-3:]):.2f}")
    cells.append("" if curves.seconds is None else f"{curves.seconds / 60:.1f}")
    return f"| {' | '.join(cells)} |"


def page_of(found: list[Curves], config: RunConfig, *, command: str, machine: str, picture: str) -> str:
    exam, trainer = config.exam, config.trainer
    rows = "\n".join(row_of(curves) for curves in found)
    return f"""# It learns

Three seeds of a run, and a control: the first of them with the rewards of each step permuted among its samples (`reward.shuffle_seed`), so that
they say nothing about the answers. All else is equal.

![Learning curves](../images/{picture})

The model `{config.model}` is warm-started with a bad habit, as base models have: it can work a sum out, and mostly guesses instead
(`infra/tiny_model/habit.py`). Most of the gain is that it gives this up; how much better it has become at the sums themselves is in the column
"right, of worked out".

| run | greedy pass@1 | sampled pass@1 | worked out | right, of worked out | mean reward | minutes |
|--|--:|--:|--:|--:|--:|--:|
{rows}

Each cell: before the first step -> after the last; mean reward: first three steps -> last three. All but the reward is of
{exam.data.num_prompts} held-out questions, none of them in the training set: one greedy answer to each, and {exam.num_samples} sampled at
temperature {exam.temperature:g}, of which "worked out" is the share that shows any working. Minutes are of the whole run, evaluations
included.

* {config.num_steps} steps of {config.data.num_prompts} prompts x {config.sampling.group_size} samples, {trainer.num_minibatches} optimizer step(s)
  each; learning rate {trainer.learning_rate:g}; LoRA of rank {trainer.lora.rank}.
* Command: `{command}`
* Machine: {machine}.
"""


def title_of(config: RunConfig) -> str:
    return f"{config.num_steps} steps of reinforcement learning on arithmetic word problems: {len(SEEDS)} seeds, and a control with shuffled rewards"


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} CPU cores ({platform.machine()}), {memory:.0f} GiB, shared with other work; Python {platform.python_version()}"


def publish(chosen: list[RunConfig], page: Path, picture: Path, *, command: str, machine: str) -> None:
    found = [curves_of(config) for config in chosen]
    write(page, page_of(found, chosen[0], command=command, machine=machine, picture=picture.name).encode())
    draw(found, title_of(chosen[0]), picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Make the runs that are missing, then the page and the picture.")
    parser.add_argument("--only-draw", action="store_true", help="make no run")
    options = parser.parse_args()
    chosen = configs("arithmetic")
    if not options.only_draw:
        from flows.command_line import with_prefect

        with with_prefect():
            for config in chosen:
                make(config)
    page, picture = CHECKOUT / "docs/results/learning.md", CHECKOUT / "docs/images/learning.png"
    publish(chosen, page, picture, command=COMMAND, machine=machine())


if __name__ == "__main__":
    main()
