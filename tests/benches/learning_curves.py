"""Does it learn? A preset with three seeds, and a control whose rewards are shuffled: curves and a table.

    python tests/benches/learning_curves.py                 makes the runs that are missing (minutes each), then page and picture
    python tests/benches/learning_curves.py --only-draw     from the runs that are there

Writes docs/results/learning.md and docs/images/learning.png. Needs matplotlib (extra `notebooks`).
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import psutil
from learning_picture import Curves, Point, draw

from flows.cli import interrupts
from flows.presets import preset
from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.machine import devices
from infra.runs import evaluations
from infra.settings import CHECKOUT, settings
from infra.store.files import read_json, write, write_json
from infra.store.layout import EvaluationFolder, RunFolder, StepFolder, run_folder
from infra.store.samples import Sample, read_samples
from infra.tiny_model.habit import is_worked_out

SEEDS = (0, 1, 2)
COMMAND = "python tests/benches/learning_curves.py"


def configs(base: RunConfig, seeds: Sequence[int] = SEEDS) -> list[RunConfig]:
    """A run for each seed, then the control, which is the first of them with shuffled rewards."""
    learning = [base.but(name=f"learning-{base.name}-{seed}", seed=seed) for seed in seeds]
    shuffled = base.reward.but(shuffle_seed=0)
    return [*learning, learning[0].but(name=f"learning-{base.name}-control", reward=shuffled)]


def make_missing(chosen: list[RunConfig]) -> None:
    from flows.cli.session import with_prefect  # here, so that drawing needs no Prefect
    from flows.run import rl_run

    with with_prefect():
        for config in chosen:
            fresh, begun = not run_folder(config.name).exists(), time.monotonic()
            rl_run(config)
            if fresh:
                write_json(RunFolder.of(config.name).seconds, time.monotonic() - begun)


def point_of(held: Evaluation, pass_reward: float) -> Point:
    samples = read_samples(EvaluationFolder((settings().workspace / held.file.path).parent).sampled)
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
    folder = RunFolder.of(config.name)
    reports = [read_json(report) for path in sorted(folder.steps.glob("[0-9]*")) if (report := StepFolder(path).report).exists()]
    duration = folder.seconds
    return Curves(
        name=config.name,
        is_control=config.reward.shuffle_seed is not None,
        rewards=[report["metrics"]["reward/mean"] for report in reports],
        points={
            held.step: point_of(held, config.eval_config.pass_reward)
            for held in evaluations.of_run(config.name, config.eval_config)
        },
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


def page_of(found: list[Curves], config: RunConfig, *, command: str, machine: str, link: str) -> str:
    eval_config, trainer = config.eval_config, config.trainer
    rows = "\n".join(row_of(curves) for curves in found)
    return f"""# It learns

{len(found) - 1} seeds of a run, and a control: the first of them with the rewards of each step permuted among its samples
(`reward.shuffle_seed`), so that they say nothing about the answers. All else is equal.

![Learning curves]({link})

The model `{config.model}` is warm-started with a bad habit, as base models have: it can work a sum out, and mostly guesses instead
(`infra/tiny_model/habit.py`). So there are two things to learn: to give the habit up (column "worked out"), which is quick and most of what can
be gained, and the sums themselves (column "right, of worked out").

| run | greedy pass@1 | sampled pass@1 | worked out | right, of worked out | mean reward | minutes |
|--|--:|--:|--:|--:|--:|--:|
{rows}

Each cell: before the first step -> after the last; mean reward: first three steps -> last three. All but the reward is of
{eval_config.data.num_prompts} held-out questions, none of them in the training set: one greedy answer to each, and {eval_config.num_samples} sampled
at
temperature {eval_config.temperature:g}, of which "worked out" is the share that shows any working. Minutes are of the whole run, evaluations
included.

Read the control by its rewards and sampled answers. Its updates are noise, and noise moves a habit too: where "worked out" drifts past a half,
greedy answers, which take the likelier beginning each time, jump although little was learnt; "right, of worked out" says which way the sums went.

* {config.num_steps} steps of {config.data.num_prompts} prompts x {config.sampling.group_size} samples, {trainer.num_minibatches} optimizer step(s)
  each; learning rate {trainer.learning_rate:g}; LoRA of rank {trainer.lora.rank}.
* Command: `{command}`
* Machine: {machine}.
"""


def title_of(chosen: list[RunConfig]) -> str:
    return (
        f"{chosen[0].num_steps} steps of reinforcement learning on arithmetic word problems: {len(chosen) - 1} seeds, and a control "
        "with shuffled rewards"
    )


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{devices.processor()}, {psutil.cpu_count()} CPU cores, {memory:.0f} GiB, shared with other work; Python {platform.python_version()}"


def publish(chosen: list[RunConfig], page: Path, picture: Path, *, link: str, command: str, machine: str) -> None:
    """Write both; link: of the picture, on the page."""
    found = [curves_of(config) for config in chosen]
    write(page, page_of(found, chosen[0], command=command, machine=machine, link=link).encode())
    draw(found, title_of(chosen), picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Make the runs that are missing, then the page and the picture.")
    parser.add_argument("--only-draw", action="store_true", help="make no run")
    options = parser.parse_args()
    try:
        settings()
    except ValueError as error:
        sys.exit(f"error: {error}")
    chosen = configs(preset("arithmetic"))
    if not options.only_draw:
        make_missing(chosen)
    page, picture = CHECKOUT / "docs/results/learning.md", CHECKOUT / "docs/images/learning.png"
    publish(chosen, page, picture, link="../images/learning.png", command=COMMAND, machine=machine())


if __name__ == "__main__":
    interrupts.install()
    interrupts.run(main)
