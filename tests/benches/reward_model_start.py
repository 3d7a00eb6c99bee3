"""What a reward model's start costs a step: `.venv/bin/python tests/benches/reward_model_start.py [--rollout SECONDS] [--times N]`.

A tiny reward model scores 32 samples after a rollout of the given seconds, in which nothing is computed. Its program starts when the rollout has
ended, or beside it, and ends after each scoring, as on a GPU. Seconds of each scoring in turn, and the ratio of the medians.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from reward_models import made

from infra.config import RewardConfig
from infra.data.prompts import Prompt
from infra.rewards.models import scorer
from infra.store.samples import Sample
from tasks.rewards import by_reward_model
from tasks.rewards.apply import judged

PROMPTS = [Prompt(n, n, f"What is {n} + 1?", str(n + 1), [1], n) for n in range(8)]
SAMPLES = [Sample(p.prompt_id, i, [1], [3], [-0.1], "stop", 0, "a", f"I think that it is {i}") for p in PROMPTS for i in range(4)]


def scoring_s(config: RewardConfig, folder: Path, rollout_s: float, *, is_ahead: bool) -> float:
    """Seconds from the rollout's end to the last score."""
    with by_reward_model.loading(config if is_ahead else config.but(name="gsm8k_numeric")):
        time.sleep(rollout_s)
        began = time.perf_counter()
        judged(config, SAMPLES, PROMPTS, folder / "scores.journal", {})
        seconds = time.perf_counter() - began
    scorer.close_all()
    (folder / "scores.journal").unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout", type=float, default=30.0)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["RATCHET_WORKSPACE"] = str(folder / "workspace")
        model = {"path": str(made("llama", folder / "model")), "device": "cpu", "max_tokens": 128}
        config = RewardConfig.model_validate({"name": "reward_model", "model": model})
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.times):
            for is_ahead, seconds in found.items():
                seconds.append(scoring_s(config, folder, options.rollout, is_ahead=is_ahead))
                print(f"{'beside the rollout' if is_ahead else 'after it'}: {seconds[-1]:.2f} s", flush=True)
        print(f"ratio {median(found[True]) / median(found[False]):.3f}")


if __name__ == "__main__":
    main()
