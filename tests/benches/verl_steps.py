"""GRPO steps by verl, in its own environment: `tests/gpu/peers.py` starts this and reads the lines that it prints.

    python tests/benches/verl_steps.py GIVEN.json

GIVEN has `folder`, `prompts`, `reward` and `overrides`, verl's settings by their full names. The prompts become a parquet file and the reward
a file of its own, then `verl.trainer.main_ppo` runs. Printed: STEP n for each step that verl's own record of metrics has, and after it
`PART name seconds` for verl's clock of that step; at the end REWARDS as JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.02
SECONDS = "timing_s/"
"""How the names begin that verl gives to the seconds of a step's parts."""
AS_IT_IS = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The template of a prompt that is rendered already."""
NAMES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
}
REWARD = """
import importlib.util

spec = importlib.util.spec_from_file_location("reward", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return module.{function}(question="", completion=solution_str, answer=ground_truth)
"""


def prepare(given: dict[str, Any]) -> list[str]:
    """Write what verl reads from files. Returns its command line."""
    import pyarrow
    import pyarrow.parquet

    folder = Path(given["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": "peers",
            "prompt": [{"role": "user", "content": each["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": each["answer"]},
            "extra_info": {"index": number},
        }
        for number, each in enumerate(given["prompts"])
    ]
    data, reward = folder / "prompts.parquet", folder / "reward.py"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    reward.write_text(REWARD.format(**given["reward"]))
    overrides = {
        **given["overrides"],
        "data.train_files": str(data),
        "data.val_files": str(data),
        "reward.custom_reward_function.path": str(reward),
        "actor_rollout_ref.model.custom_chat_template": AS_IT_IS,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "hydra.run.dir": str(folder / "hydra"),
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={as_hydra(value)}" for name, value in overrides.items())]


def as_hydra(value: Any) -> str:
    """A value in the grammar of Hydra's command line. Text is quoted: it may have braces and commas."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(as_hydra(each) for each in value) + "]"
    return json.dumps(value)


def finished_lines(path: Path, seen: int) -> Iterator[dict[str, Any]]:
    """The steps of verl's record from number `seen` on. A line that is still written is left for later."""
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines()[seen:]:
        yield json.loads(line)


def main() -> None:
    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    argv = prepare(given)
    record = Path(given["folder"]) / "metrics.jsonl"
    program = subprocess.Popen(argv, env={**os.environ, **NAMES, "VERL_FILE_LOGGER_PATH": str(record)})
    rewards: list[float] = []
    ended = False
    while not ended:
        ended = program.poll() is not None  # asked first: what it wrote before its end is read below
        for row in finished_lines(record, len(rewards)):
            metrics = row["data"]
            rewards.append(metrics["critic/rewards/mean"])
            print("\nSTEP", row["step"], flush=True)
            for name, value in metrics.items():
                if name.startswith(SECONDS):
                    print("\nPART", name.removeprefix(SECONDS), f"{value:.3f}", flush=True)
        time.sleep(POLL_S)
    print("REWARDS", json.dumps(rewards), flush=True)
    sys.exit(program.returncode)


if __name__ == "__main__":
    main()
