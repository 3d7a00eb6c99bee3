"""Ratchet beside TRL, verl or both on one GPU, in turns: the same model, prompts, lengths, batch, LoRA, optimizer and reward.

    python tests/gpu/peers.py OUT.json --model FOLDER [--trl-python PYTHON] [--verl-python PYTHON] [--blocks 2] [--steps 5] [--trl-steps 4]
        [--verl-steps 4] [--prompts 64] [--group 8] [--prompt-tokens 512] [--output-tokens 512] [--rank 16] [--micro-batch 8]
        [--vllm-memory 0.5] [--set FIELD=VALUE ...] [--trl NAME=VALUE ...] [--verl NAME=VALUE ...]

A block of Ratchet is `hand_over.py run`: the flow with its Prefect server and MLflow. A block of TRL is its GRPOTrainer with vLLM in the same
process (`vllm_mode=colocate`) and its sleep mode. Samples have exactly --output-tokens. Both sides are timed from outside: from one finished
step to the next, the first NUM_WARM of a block left out. GPU and memory are what `watch.py` saw meanwhile.

TRL's settings are its fastest for this task: no second computation of the sampled log-probabilities
(`vllm_importance_sampling_correction=False`, which Ratchet's correction does not need), no recomputation, no logging but the reward.

A block of verl is its `main_ppo` with vLLM on the same GPU, which sleeps while it trains, and FSDP2. Its settings likewise:
`rollout_correction.bypass_mode` saves the second computation of log-probabilities, padding is removed, and micro-batches are filled to
16384 tokens (`use_dynamic_bsz`).
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from watch import host_gib, idle_frac, rows_of, watching

from infra.config import DataConfig
from infra.data.forms.row import Row
from infra.data.prompts import all_tokenized
from infra.models import base_model
from infra.store.files import read_json, read_json_lines, write_json

HERE = Path(__file__).resolve().parent


class Failed(Exception):
    """A side's program failed. What it says ends with its log."""


NUM_WARM = 2
"""Steps that are not counted: kernels are compiled, and a rollout has none before it."""
POLL_S = 0.02
RUN = "hand-over-run"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--model", type=Path, required=True)
    for peer in PEERS:
        p.add_argument(f"--{peer}-python", nargs="+", help="the interpreter of its environment, with NAME=VALUE before it")
    p.add_argument("--blocks", type=int, default=2)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--trl-steps", type=int, default=4)
    p.add_argument("--verl-steps", type=int, default=4)
    for name, default in {
        "prompts": 64,
        "group": 8,
        "prompt-tokens": 512,
        "output-tokens": 512,
        "rank": 16,
        "micro-batch": 8,
    }.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--vllm-memory", type=float, default=0.5, help="the share of the GPU that vLLM may take")
    p.add_argument("--gpu", type=int, default=0, help="number, as the driver counts")
    p.add_argument("--peer-limit-s", type=float, default=3000.0, help="seconds after which a block of a peer is ended")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of Ratchet's configuration")
    p.add_argument("--trl", action="append", default=[], metavar="NAME=VALUE", help="of TRL's configuration, the value as JSON")
    p.add_argument("--verl", action="append", default=[], metavar="NAME=VALUE", help="of verl's configuration, the value as JSON")
    p.add_argument("--small", action="store_true", help="on a CPU, TRL without vLLM, to see that the script works")
    o = p.parse_args()
    peers = [peer for peer in PEERS if getattr(o, f"{peer}_python")]
    if not peers or (o.small and "verl" in peers):
        p.error("--trl-python or --verl-python is missing" if not peers else "--small: verl has no engine that runs on a CPU")
    if o.small:
        o.prompts, o.group, o.prompt_tokens, o.output_tokens, o.rank, o.micro_batch = 4, 2, 64, 24, 8, 8
    found: dict[str, Any] = {"command": sys.argv, "blocks": []}
    for number in range(o.blocks):
        folder = o.out.resolve().parent / f"block-{number}"
        folder.mkdir(parents=True)
        for side in ("ratchet", *peers):
            try:
                figures = ratchet(o, folder) if side == "ratchet" else peer_block(o, folder, side)
            except Failed as error:
                if side == "ratchet":
                    raise
                figures = {"error": str(error), "seconds_of_steps": []}
            found["blocks"].append({"side": side, "block": number, **figures})
            found["ratio"] = {peer: ratio(found["blocks"], peer) for peer in peers}
            write_json(o.out, found)
            print(json.dumps(found["blocks"][-1]), flush=True)
    for peer in peers:
        print(f"{peer} takes {found['ratio'][peer]} times as long a step as Ratchet")
    failed = sorted({block["side"] for block in found["blocks"] if "error" in block})
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def ratio(blocks: list[dict[str, Any]], peer: str) -> float | None:
    """Of the medians over all blocks so far."""
    seconds = {side: [s for b in blocks if b["side"] == side for s in b["seconds_of_steps"]] for side in ("ratchet", peer)}
    if not all(seconds.values()):
        return None
    return round(statistics.median(seconds[peer]) / statistics.median(seconds["ratchet"]), 3)


def ratchet(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = [f"--{name}={getattr(o, name.replace('-', '_'))}" for name in SHAPE] + [f"--set={each}" for each in o.set]
    shape += ["--small"] if o.small else ["--set=sampling.ignore_eos=true"]
    made = folder / "hand-over.json"
    argv = [
        sys.executable,
        str(HERE / "hand_over.py"),
        str(made),
        "run",
        f"--steps={o.steps}",
        "--full-prompts",
        "--limit-s=3000",
    ]
    env = {**os.environ, "RATCHET_WORKSPACE": str(folder)}
    manifests = folder / "runs" / RUN / "steps"
    figures = watched(
        o,
        [*argv, f"--model={o.model}", *shape],
        env,
        folder / "ratchet.log",
        lambda: len(list(manifests.glob("*/manifest.json"))),
    )
    steps = read_json(made)["steps"][NUM_WARM:]
    tokens = statistics.median(step["rollout_tokens_per_s"] for step in steps)
    train = statistics.median(step["trainer_seconds"]["train"] for step in steps)
    return {**figures, "rollout_tokens_per_s": tokens, "train_s": train, "mismatch": steps[-1]["mismatch"]}


SHAPE = ("prompts", "group", "prompt-tokens", "output-tokens", "rank")


def peer_block(o: argparse.Namespace, folder: Path, peer: str) -> dict[str, Any]:
    """A block of TRL or verl, by its program in tests/benches, which prints STEP and PART lines."""
    given, log = folder / f"{peer}.json", folder / f"{peer}.log"
    settings, program, rollout = PEERS[peer]
    write_json(given, settings(o, folder))
    *names, python = getattr(o, f"{peer}_python")
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = {**plain, **dict(name.split("=", 1) for name in names)}
    argv = [python, str(HERE.parent / "benches" / program), str(given)]
    figures = watched(o, argv, env, log, lambda: text_of(log).count("\nSTEP "), o.peer_limit_s)
    parts: dict[str, list[float]] = {}
    for line in text_of(log).splitlines():
        if line.startswith("PART "):
            _, name, took = line.split()
            parts.setdefault(name, []).append(float(took))
    seconds = {name: statistics.median(values[NUM_WARM:] or values) for name, values in parts.items()}
    tokens = o.prompts * o.group * o.output_tokens
    rate = {"rollout_tokens_per_s": tokens / seconds[rollout]} if rollout in seconds else {}
    return {**figures, **rate, "seconds_of_parts": seconds}


def text_of(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def task_of(o: argparse.Namespace, config: dict[str, Any], folder: Path, num_steps: int) -> dict[str, Any]:
    """What every peer is given: the reward, and the prompts of Ratchet's block, rendered."""
    questions = [row["question"] for row in read_json_lines(folder / "full-prompts.jsonl")][: num_steps * o.prompts]
    tokenizer = base_model.tokenizer(o.model)
    ids = all_tokenized(DataConfig.model_validate(config["data"]), o.model, [Row(each, "") for each in questions])
    return {
        "prompts": [{"prompt": tokenizer.decode(each), "answer": "1"} for each in ids],
        "reward": {"file": str(HERE / "mechanical_reward.py"), "function": "reward"},
    }


def trl_settings(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `trl_steps.py` is given."""
    config = read_json(folder / "runs" / RUN / "config.json")
    trainer, loss = config["trainer"], config["trainer"]["loss"]
    on_gpu = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": o.vllm_memory,
        "vllm_max_model_length": o.prompt_tokens + o.output_tokens,
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        "bf16": True,
        "optim": "adamw_torch_fused",
    }
    on_cpu = {"use_cpu": True, "bf16": False}
    size = o.prompts * o.group
    return {
        "model": str(o.model),
        "num_threads": os.cpu_count(),
        **task_of(o, config, folder, o.trl_steps),
        "lora": {
            "r": o.rank,
            "lora_alpha": 2 * o.rank,
            "target_modules": list(trainer["lora"]["target_modules"]),
            "task_type": "CAUSAL_LM",
        },
        "grpo": {
            "output_dir": str(folder / "trl"),
            "max_steps": o.trl_steps,
            "per_device_train_batch_size": o.micro_batch,
            "gradient_accumulation_steps": size // o.micro_batch,
            "num_generations": o.group,
            "max_completion_length": o.output_tokens,
            "temperature": config["sampling"]["temperature"],
            "shuffle_dataset": False,
            "beta": 0.0,
            "epsilon": loss["clip_low"],
            "epsilon_high": loss["clip_high"],
            "loss_type": "bnpo",  # the mean over the tokens of the batch
            "learning_rate": trainer["learning_rate"],
            "lr_scheduler_type": "constant",
            "max_grad_norm": trainer["max_grad_norm"],
            "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32" if o.small else "bfloat16"},
            "logging_steps": 1,
            "seed": config["seed"],
            **(on_cpu if o.small else on_gpu),
            **{name: json.loads(value) for name, value in (each.split("=", 1) for each in o.trl)},
        },
    }


def verl_settings(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `verl_steps.py` is given: verl's settings by their full names."""
    config = read_json(folder / "runs" / RUN / "config.json")
    trainer, loss = config["trainer"], config["trainer"]["loss"]
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "rollout_correction.bypass_mode": True,
        },
        "data": {
            "train_batch_size": o.prompts,
            "max_prompt_length": o.prompt_tokens,
            "max_response_length": o.output_tokens,
            "shuffle": False,
        },
        "actor_rollout_ref.model": {
            "path": str(o.model),
            "lora_rank": o.rank,
            "lora_alpha": 2 * o.rank,
            "target_modules": list(trainer["lora"]["target_modules"]),
            "use_remove_padding": True,
            "use_liger": True,
            "enable_gradient_checkpointing": False,
        },
        "actor_rollout_ref.actor": {
            "strategy": "fsdp2",
            "ppo_mini_batch_size": o.prompts,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 16384,
            "use_kl_loss": False,
            "clip_ratio_low": loss["clip_low"],
            "clip_ratio_high": loss["clip_high"],
            "loss_agg_mode": "token-mean",
            "grad_clip": trainer["max_grad_norm"],
            "optim.lr": trainer["learning_rate"],
            "optim.weight_decay": 0.0,
        },
        "actor_rollout_ref.rollout": {
            "name": "vllm",
            "n": o.group,
            "temperature": config["sampling"]["temperature"],
            "ignore_eos": True,
            "tensor_model_parallel_size": 1,
            "gpu_memory_utilization": o.vllm_memory,
            "max_num_seqs": o.prompts * o.group,
            "max_model_len": o.prompt_tokens + o.output_tokens,
            "load_format": "safetensors",
        },
        "reward": {"num_workers": 2},
        "trainer": {
            "n_gpus_per_node": 1,
            "nnodes": 1,
            "total_training_steps": o.verl_steps,
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": -1,
            "resume_mode": "disable",
            "logger": ["console", "file"],
        },
    }
    overrides = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    given = {name: json.loads(value) for name, value in (each.split("=", 1) for each in o.verl)}
    return {**task_of(o, config, folder, o.verl_steps), "folder": str(folder / "verl"), "overrides": {**overrides, **given}}


PEERS = {"trl": (trl_settings, "trl_steps.py", "generate"), "verl": (verl_settings, "verl_steps.py", "gen")}
"""Of each peer: what its program is given, the program, and the name of the rollout's seconds."""


def watched(
    o: argparse.Namespace, argv: list[str], env: dict[str, str], log: Path, num_done: Any, limit_s: float = math.inf
) -> dict[str, Any]:
    """Run a program to its end, with a mark for each step that it finishes, and what the watcher saw between the counted marks.

    limit_s: Seconds after which the program and its descendants are killed. The steps that it had finished are counted.

    Errors: Failed, if the program fails or finishes too few steps.
    """
    csv, before, begin = log.with_suffix(".csv"), host_gib(), time.time()
    marks: list[float] = []
    is_late = False
    with watching(None if o.small else csv, o.gpu), log.open("w") as file:
        program = subprocess.Popen(argv, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        while program.poll() is None:
            if is_late := time.time() - begin > limit_s:
                end_all(program)
            if num_done() > len(marks):
                marks.append(time.time())
            time.sleep(POLL_S)
    if (program.returncode and not is_late) or len(marks) <= NUM_WARM:
        raise Failed(f"{argv[1]} ended with {program.returncode} after {len(marks)} steps, {log}: {log.read_text()[-3000:]}")
    counted = marks[NUM_WARM - 1 :]
    seconds = [after - before for before, after in pairwise(counted)]
    figures: dict[str, Any] = {
        "seconds_of_steps": [round(each, 3) for each in seconds],
        "step_s": statistics.median(seconds),
        "samples_per_s": o.prompts * o.group / statistics.median(seconds),
        "first_step_s": marks[0] - begin,
    }
    if not o.small:
        rows = rows_of(csv, counted[0], counted[-1])
        figures |= {
            "gpu_idle_frac": idle_frac(rows),
            "gpu_peak_gib": max(row.gpu_gib for row in rows),
            "host_gib": max(row.host_gib for row in rows) - before,
        }
    return figures


def end_all(program: "subprocess.Popen[bytes]") -> None:
    """End a program and its descendants, also those that have left its process group."""
    processes = [*psutil.Process(program.pid).children(recursive=True), psutil.Process(program.pid)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    program.wait()


if __name__ == "__main__":
    main()
