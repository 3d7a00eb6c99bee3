"""Steps of Ratchet and of TRL's GRPOTrainer on a CPU, in turns: seconds, CPU seconds of all processes, and learning.

    .venv/bin/python tests/benches/beside_trl.py --trl-python /tmp/trl-env/bin/python [--steps 12] [--rounds 3] [--page PAGE.md]

Both train the same tiny model on the same prompts, in the same order, with the same reward, group size, sampling, loss, optimizer and LoRA.
TRL's prompts are those that Ratchet drew. A step lasts from one finished step to the next; the first two of each round are not counted.
CPU seconds are those of all processes of a side: servers, engine, trainer and upload included. TRL's environment is no part of this project:

    python3 -m venv /tmp/trl-env
    /tmp/trl-env/bin/pip install torch==2.13.0
    /tmp/trl-env/bin/pip install trl==1.16.0 peft==0.21.2 transformers==5.12.1
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from process_cpu import Tree

CHECKOUT = Path(__file__).resolve().parents[2]
NUM_WARM = 2
POLL_S = 0.02
KINDS = {
    "infra.tracking.upload": "upload",
    "torch.distributed.run": "torchrun",
    "infra.megatron": "trainer",
    "chat_renderer": "chat templates",
    "sglang": "engine",
    "multiprocessing": "engine",
    "prefect server": "Prefect's server",
    "bin/ratchet": "flow",
    "trl_steps.py": "TRL",
}
"""What a process is, by a part of its command line; the first that fits."""


class Mark(NamedTuple):
    """The end of a step."""

    at: float
    cpu: Counter[str]
    """CPU seconds until then by kind of process."""


class Round(NamedTuple):
    wall: list[float]
    """Seconds of each counted step."""
    cpu: list[float]
    kinds: dict[str, float]
    """CPU seconds a step by kind of process."""
    rewards: list[float]
    """Mean reward of each step, the first ones too."""


def kind_of(command: str) -> str:
    return next((kind for part, kind in KINDS.items() if part in command), "others")


def followed(tree: Tree, pid: int, num_done: Callable[[], int]) -> list[Mark]:
    """A mark for each step of a program until it ends."""
    marks: list[Mark] = []
    while True:
        codes = tree.ended()
        if num_done() > len(marks):
            cpu: Counter[str] = Counter()
            for command, seconds in tree.by_command().items():
                cpu[kind_of(command)] += seconds  # type: ignore[assignment]
            marks.append(Mark(time.monotonic(), cpu))
        if pid in codes:
            if codes[pid]:
                raise SystemExit(f"error: the program ended with {codes[pid]}, its output is in the workspace's folder")
            return marks
        time.sleep(POLL_S)


def round_of(marks: list[Mark], rewards: list[float]) -> Round:
    counted = marks[NUM_WARM - 1 :]
    pairs = list(itertools.pairwise(counted))
    first, last = counted[0], counted[-1]
    kinds = {kind: (last.cpu[kind] - first.cpu[kind]) / len(pairs) for kind in last.cpu}
    return Round(
        wall=[after.at - before.at for before, after in pairs],
        cpu=[after.cpu.total() - before.cpu.total() for before, after in pairs],
        kinds={kind: seconds for kind, seconds in sorted(kinds.items()) if seconds >= 0.005},
        rewards=rewards,
    )


def ratchet(workspace: Path, model: str, name: str, num_steps: int) -> Round:
    """A run with everything that belongs to it: Prefect, engine, trainer and upload are started, and ended afterwards."""
    env, steps, tree = {**os.environ, "RATCHET_WORKSPACE": str(workspace)}, workspace / "runs" / name / "steps", Tree()
    program = str(Path(sys.executable).with_name("ratchet"))
    argv = [program, "run", "--preset", "smoke", "--name", name, "--model", model, "--num_steps", str(num_steps)]
    try:
        pid = tree.start([*argv, "--evaluation.every", "100000"], env, workspace / f"{name}.log", CHECKOUT)
        marks = followed(tree, pid, lambda: len(list(steps.glob("*/manifest.json"))))
    finally:
        subprocess.run([program, "down"], env=env, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
    reports = [json.loads((steps / f"{step:06d}/report.json").read_text()) for step in range(num_steps)]
    return round_of(marks, [report["metrics"]["reward/mean"] for report in reports])


def settings_of(folder: Path, model: str, output: Path) -> dict[str, Any]:
    """What `trl_steps.py` needs to do the same as a run."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    trainer, sampling, data = config["trainer"], config["sampling"], config["data"]
    files = sorted(folder.glob("steps/*/prompts.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    size = data["num_prompts"] * sampling["group_size"]
    return {
        "model": model,
        "num_threads": os.cpu_count(),
        "reward": {"file": str(CHECKOUT / "infra/rewards/built_in/gsm8k.py"), "function": "numeric"},
        "prompts": [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows],
        "lora": {
            "r": trainer["lora"]["rank"],
            "lora_alpha": trainer["lora"]["alpha"],
            "target_modules": list(trainer["lora"]["target_modules"]),
            "task_type": "CAUSAL_LM",
        },
        "grpo": {
            "output_dir": str(output),
            "use_cpu": True,
            "bf16": False,
            "max_steps": len(files),
            "per_device_train_batch_size": size,
            "num_generations": sampling["group_size"],
            "max_completion_length": sampling["max_output_tokens"],
            "temperature": sampling["temperature"],
            "shuffle_dataset": False,
            "beta": 0.0,
            "epsilon": trainer["loss"]["clip_low"],
            "epsilon_high": trainer["loss"]["clip_high"],
            "loss_type": "bnpo",  # the mean over the tokens of the batch
            "learning_rate": trainer["learning_rate"],
            "lr_scheduler_type": "constant",
            "adam_beta1": trainer["adam_beta1"],
            "adam_beta2": trainer["adam_beta2"],
            "adam_epsilon": trainer["adam_eps"],
            "weight_decay": trainer["weight_decay"],
            "max_grad_norm": trainer["max_grad_norm"],
            "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32"},
            "logging_steps": 1,
            "seed": config["seed"],
        },
    }


def trl(workspace: Path, model: str, python: Path, name: str) -> Round:
    """The steps of a run of Ratchet, by TRL."""
    given, output, tree = workspace / f"{name}-trl.json", workspace / f"{name}-trl.log", Tree()
    given.write_text(json.dumps(settings_of(workspace / "runs" / name, model, workspace / "trl")))
    output.write_text("")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    pid = tree.start([str(python), str(Path(__file__).with_name("trl_steps.py")), str(given)], env, output, workspace)
    marks = followed(tree, pid, lambda: output.read_text(errors="replace").count("STEP "))
    (line,) = [line for line in output.read_text(errors="replace").splitlines() if line.startswith("REWARDS ")]
    return round_of(marks, json.loads(line.removeprefix("REWARDS ")))


def page_of(sides: dict[str, list[Round]], command: str) -> str:
    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    def steps(side: str, what: str) -> list[float]:
        return [value for each in sides[side] for value in getattr(each, what)]

    ours, theirs = sides
    rows = []
    for name, what in {"seconds a step": "wall", "CPU seconds a step": "cpu"}.items():
        ratio = statistics.median(steps(ours, what)) / statistics.median(steps(theirs, what))
        rows.append(f"| {name}: median (range) | {cell(steps(ours, what))} | {cell(steps(theirs, what))} | {ratio:.2f} |")
    for name, part in {"first": slice(0, 3), "last": slice(-3, None)}.items():
        means = [[statistics.mean(each.rewards[part]) for each in sides[side]] for side in sides]
        ratio = statistics.median(means[0]) / max(statistics.median(means[1]), 1e-9)
        rows.append(f"| mean reward of the {name} 3 steps | {cell(means[0])} | {cell(means[1])} | {ratio:.2f} |")
    kinds = {kind for each in sides[ours] for kind in each.kinds}
    parts = [f"{kind} {statistics.median(each.kinds.get(kind, 0.0) for each in sides[ours]):.2f}" for kind in sorted(kinds)]
    curves = [f"* {side}: {', '.join(f'{value:.2f}' for value in each.rewards)}" for side, all_ in sides.items() for each in all_]
    table = "\n".join([f"| | {ours} | {theirs} | ratio |", "|--|--:|--:|--:|", *rows])
    return (
        f"# Ratchet beside TRL on a CPU\n\n```\n{command}\n```\n\n{os.cpu_count()} CPU cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} at the end; {len(sides[ours])} rounds in turns, {len(sides[ours][0].wall)} counted steps each.\n\n{table}\n\n"
        f"CPU seconds a step of Ratchet by process: {', '.join(parts)}.\n\nMean reward by step:\n\n" + "\n".join(curves) + "\n"
    )


def tiny_model(workspace: Path) -> str:
    os.environ["RATCHET_WORKSPACE"] = str(workspace)
    from infra.models import base_model

    return str(base_model.locate("tiny"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--steps", type=int, default=12, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="a folder of a model (default: the model tiny, which is made first)")
    parser.add_argument("--page", type=Path, help="write the page here")
    options = parser.parse_args()
    if options.steps < NUM_WARM + 1 or options.rounds < 1:
        parser.error(f"--steps {options.steps} --rounds {options.rounds}: at least {NUM_WARM + 1} steps and 1 round are needed")
    if not options.trl_python.exists():
        parser.error(f"--trl-python {options.trl_python} does not exist: the head of {__file__} says how it is made")
    sides: dict[str, list[Round]] = {"Ratchet": [], "TRL": []}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        model = options.model or tiny_model(workspace)
        for number in range(options.rounds):
            sides["Ratchet"].append(ratchet(workspace, model, f"r{number}", options.steps))
            sides["TRL"].append(trl(workspace, model, options.trl_python, f"r{number}"))
    page = page_of(sides, " ".join(["python", "tests/benches/beside_trl.py", *sys.argv[1:]]))
    sys.stdout.write(page)
    if options.page:
        options.page.write_text(page)


if __name__ == "__main__":
    main()
