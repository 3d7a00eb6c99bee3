"""What a curriculum does to the share of useful groups, with a simulated learner: `.venv/bin/python tests/benches/curriculum.py`.

The rows' difficulties are normally distributed. A sample of row r passes with probability sigmoid(skill - difficulty of r); each useful group
raises the skill by a constant. Draws and pass rates are those of a run (infra.data.forms.curriculum), engine and trainer are not there: this shows
what the choice of rows does, and nothing of how fast a model learns. Share of useful groups: mean and range over seeds.
"""

import argparse
import math
import random
from statistics import fmean

from infra.config import DataConfig
from infra.data import dataset
from infra.data.forms.curriculum import PassRate, ordered, pass_rate_of

NUM_PROMPTS, GROUP, SPREAD, LEARNS = 32, 8, 4.0, 0.0005
CONFIGS = {
    "none": DataConfig(num_prompts=NUM_PROMPTS),
    "uncertain": DataConfig(num_prompts=NUM_PROMPTS, curriculum="uncertain"),
    "between 0.1 and 0.9": DataConfig(num_prompts=NUM_PROMPTS, curriculum="between", pass_rate_between=(0.1, 0.9)),
}


def useful_shares(config: DataConfig, num_rows: int, num_steps: int, seed: int) -> list[float]:
    """The share of useful groups of each step."""
    chance = random.Random(seed)
    difficulties = [chance.gauss(0.0, SPREAD) for _ in range(num_rows)]
    skill, shares = -1.0, []
    rates: dict[int, PassRate] = {}
    for step in range(num_steps):
        if config.curriculum == "none":
            drawn = dataset.order(num_rows, step * NUM_PROMPTS, NUM_PROMPTS, seed)
        else:
            drawn = ordered(config, range(num_rows), rates, step=step, seed=seed)[:NUM_PROMPTS]
        num_useful = 0
        for number in drawn:
            passes = 1 / (1 + math.exp(difficulties[number] - skill))
            rewards = [float(chance.random() < passes) for _ in range(GROUP)]
            rates[number] = PassRate(pass_rate_of(rewards), GROUP, step)
            num_useful += 0 < sum(rewards) < GROUP
        skill += LEARNS * num_useful
        shares.append(num_useful / NUM_PROMPTS)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print(f"{options.rows} rows, {options.steps} steps of {NUM_PROMPTS} groups of {GROUP}, {options.seeds} seeds")
    parts = [range(begin, begin + options.steps // 4) for begin in range(0, options.steps, options.steps // 4)]
    for name, config in CONFIGS.items():
        runs = [useful_shares(config, options.rows, options.steps, seed) for seed in range(options.seeds)]
        means = [fmean(run) for run in runs]
        quarters = ", ".join(f"{fmean(fmean(run[i] for i in part) for run in runs):.1%}" for part in parts)
        print(f"{name}: {fmean(means):.1%} ({min(means):.1%} to {max(means):.1%}); by quarter of the run {quarters}")


if __name__ == "__main__":
    main()
