"""Two whole steps on this machine's GPUs with the real parts, and what they came to.

    python tests/gpu/two_steps.py OUT.json [options of ratchet quickstart, such as --FIELD VALUE]

Writes the metrics of both steps and fails where a step is not what it should be on a GPU. tests/gpu must be on PYTHONPATH when
the reward is `mechanical_reward.reward`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from infra.machine import devices
from infra.settings import settings
from infra.store.files import read_json, write_json
from infra.store.layout import run_folder

RUN = "two-steps-on-gpu"
BF16_GATE_NATS = 0.15


def main(out: Path, arguments: list[str]) -> None:
    if not devices.num_gpus():
        sys.exit("no NVIDIA GPU here")
    for _ in range(2):
        program = [sys.executable, "-c", "from flows.cli.app import main; main()", "quickstart"]
        subprocess.run([*program, "--run", RUN, *arguments], check=True)
    steps = [read_json(run_folder(RUN) / "steps" / f"{step:06d}" / "report.json")["metrics"] for step in range(2)]
    manifest = read_json(run_folder(RUN) / "steps/000001/manifest.json")
    found = {"colocation": manifest["colocation"], "versions": manifest["versions"], "steps": steps}
    write_json(out, found)
    print(json.dumps(found, indent=1))
    check(steps, manifest)
    print("2 passed, 0 failed")


def check(steps: list[dict[str, Any]], manifest: dict[str, Any]) -> None:
    launches = 3 if manifest["colocation"]["colocation"] == "restart" else 1  # the first, and one after each step's training
    assert read_json(settings().workspace / "engine-launches.json") == launches, "the engine was started more or less often"
    assert manifest["adapter_out"]["version"] == 2
    for metrics in steps:
        assert metrics["train/grad_norm"] > 0
        assert metrics["mismatch/mean_abs_logprob_diff"] < BF16_GATE_NATS
        if manifest["colocation"]["colocation"] == "offload":
            assert metrics["memory/released_gib"] > 0.8 * metrics["memory/inference_gib"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
