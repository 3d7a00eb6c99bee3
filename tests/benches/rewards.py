"""What scoring adds to a step: `.venv/bin/python tests/benches/rewards.py [--samples N]`.

GSM8K's reward in the flow's process, the same function as a user's file in worker processes (first step, which starts them, and later
ones), and the whole task's part with the journal. Seconds, best and median of five.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from infra.config import RewardConfig
from infra.data.prompts import Prompt
from infra.rewards import client
from infra.settings import CHECKOUT
from infra.store.samples import Sample
from tasks.rewards.apply import judged

GROUP = 8
SOLUTION = "She has 12 pens and buys 30 more, so 12 + 30 = <<12+30=42>>42 pens. " * 6


def asked(num_samples: int) -> tuple[list[Sample], list[Prompt]]:
    prompts = [Prompt(n, n, f"{SOLUTION} How many?", "#### 42", [1] * 100, n) for n in range(num_samples // GROUP)]
    samples = [
        Sample(p.prompt_id, i, p.prompt_tokens, [1] * 200, [-0.1] * 200, "stop", 0, "a", f"{SOLUTION}\n#### {41 + i % 2}")
        for p in prompts
        for i in range(GROUP)
    ]
    return samples, prompts


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4096)
    samples, prompts = asked(parser.parse_args().samples)
    with tempfile.TemporaryDirectory() as folder:
        file, journal = Path(folder) / "mine.py", Path(folder) / "scores.journal"
        file.write_text((CHECKOUT / "infra/rewards/built_in/gsm8k.py").read_text())
        for name in ("gsm8k_numeric", f"{file}:numeric"):

            def score(name: str = name) -> None:
                judged(RewardConfig(name=name), samples, prompts, journal, {})
                journal.unlink(missing_ok=True)

            first, later = seconds(score), [seconds(score) for _ in range(5)]
            print(f"{Path(name).name}: first {first:.3f} s, later best {min(later):.3f} s, median {median(later):.3f} s")
        client.close_all()


if __name__ == "__main__":
    main()
