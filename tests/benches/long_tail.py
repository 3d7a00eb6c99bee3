"""Samples per second with 0, 1 and 4 steps ahead where some answers are much longer than others.

    .venv/bin/python tests/benches/long_tail.py [--steps 30] [--train_s 3] [--rollout_s 5] [--sigma 1.2]

The flow of a run as it is, with Prefect's server and the real trainer on a tiny model with random weights. The engine is the scripted one, and
takes for a rollout as long as its longest answer: the maximum of the samples' lognormal times (all at once, as by an engine with room for
all). Training takes train_s seconds more than it does.
"""

import argparse
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestration import random_model_in

STALENESS = (0, 1, 4)
NUM_PROMPTS, GROUP_SIZE = 4, 4
SEED = 5


def rollout_seconds(num_steps: int, mean_s: float, sigma: float) -> list[float]:
    """Return the seconds of each step's rollout: of its longest answer. Their mean is mean_s."""
    rng = random.Random(SEED)
    longest = [max(rng.lognormvariate(0, sigma) for _ in range(NUM_PROMPTS * GROUP_SIZE)) for _ in range(num_steps)]
    return [mean_s * each / statistics.fmean(longest) for each in longest]


def config_of(staleness: int, num_steps: int, model: Path) -> Any:
    from flows.presets import smoke

    base = smoke()
    correction = {"mode": "decoupled", "kind": "tis", "max_staleness": staleness}
    return base.but(
        name=f"tail-{staleness}",
        model=str(model),
        num_steps=num_steps,
        data=base.data.but(num_prompts=NUM_PROMPTS),
        engine=base.engine.but(kind="scripted"),
        sampling=base.sampling.but(group_size=GROUP_SIZE),
        trainer=base.trainer.but(mode="persistent", max_mismatch=None, loss=base.trainer.loss.but(correction=correction)),
        evaluation=base.evaluation.but(every=0),
    )


def slow_down(seconds: Sequence[float], train_s: float) -> None:
    """Make rollouts and trainings take longer in this process."""
    from infra.engines.scripted import ScriptedEngine
    from infra.trainers.resident import PersistentTrainer

    sample, train = ScriptedEngine.sample, PersistentTrainer.train

    def slow_sample(engine: Any, missing: Any, *given: Any, **how: Any) -> Any:
        time.sleep(seconds[missing[0].prompt.prompt_id // NUM_PROMPTS])
        return sample(engine, missing, *given, **how)

    def slow_train(*given: Any) -> Any:
        time.sleep(train_s)
        return train(*given)

    ScriptedEngine.sample = slow_sample  # type: ignore[method-assign]
    PersistentTrainer.train = slow_train  # type: ignore[method-assign]


def seconds_of(config: Any, skipped: int) -> float:
    """Make the run, and return the seconds from the commit of its first step, which starts the trainer, to the last, by the steps between."""
    from flows.run import rl_run
    from infra.runs.manifest import read_manifest
    from infra.settings import settings
    from infra.store.layout import step_folder_of

    rl_run.with_options(result_storage=settings().results)(config)
    first, last = (read_manifest(step_folder_of(config.name, step)).committed_at for step in (skipped, config.num_steps - 1))
    return (last - first) / (config.num_steps - 1 - skipped)


def measure(workspace: Path, seconds: list[float], train_s: float) -> None:
    from prefect.settings import temporary_settings

    from flows.cli.session import client_settings
    from infra.services import servers

    model = random_model_in(workspace / "random-tiny")
    slow_down(seconds, train_s)
    found: dict[int, float] = {}
    with temporary_settings(client_settings(servers.ensure_prefect())):
        for staleness in STALENESS:
            found[staleness] = seconds_of(config_of(staleness, len(seconds), model), skipped=1)
            rate, ratio = NUM_PROMPTS * GROUP_SIZE / found[staleness], found[0] / found[staleness]
            print(f"{staleness} ahead: {found[staleness]:.2f} s a step, {rate:.2f} samples/s, x {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--train_s", type=float, default=3.0, help="seconds that a training takes longer than it does")
    parser.add_argument("--rollout_s", type=float, default=5.0, help="mean seconds of a rollout")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of an answer's time")
    asked = parser.parse_args()
    seconds = rollout_seconds(asked.steps, asked.rollout_s, asked.sigma)
    print(f"rollouts take {min(seconds):.1f} to {max(seconds):.1f} s, {statistics.median(seconds):.1f} s in the median")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["RATCHET_WORKSPACE"] = str(folder)
        os.environ.pop("PREFECT_API_URL", None)
        from flows.cli.services.servers import stop

        stack.callback(stop)
        measure(folder, seconds, asked.train_s)


if __name__ == "__main__":
    main()
