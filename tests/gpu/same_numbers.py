"""One step of small models on this machine's GPUs, in every layout that fits on them, against one GPU and against the CPU.

    python tests/gpu/same_numbers.py OUT.json [--models small small-moe] [--dtypes float32 bfloat16]

Prints a line for each case: how far loss, gradient norm, gradients (the optimizer's first moment, by its L2 norm) and adapter are from
the reference. Exit code 1 if one is further than it should be. Without a GPU the same on CPU ranks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from infra.config import TrainerConfig
from infra.machine import ports
from infra.megatron.protocol.job import ADAPTER_WEIGHTS, TrainJob, TrainResult
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.store.files import write_json

sys.path.insert(0, str(Path(__file__).parent))
import random_model

ROOT = Path(__file__).parents[2]
TWO: dict[str, Any] = {"num_processes": 2}
SEQUENCE: dict[str, Any] = TWO | {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "1": {},
        "1, small micro-batches": {"max_tokens_per_microbatch": 512},
        "1, recomputed": {"recompute": True},
        "DP2": TWO,
        "TP2": TWO | {"tensor_parallel": 2},
        "TP2+SP": SEQUENCE,
        "TP2+SP, recomputed": SEQUENCE | {"recompute": True},
    },
    "small-moe": {"1": {}, "DP2": TWO, "EP2": TWO | {"expert_parallel": 2}, "TP2+SP": SEQUENCE},
}
TOLERANCES = {
    "float32": {"loss": 2e-4, "grad_norm": 2e-3, "gradients": 5e-3},
    "bfloat16": {"loss": 2e-2, "grad_norm": 5e-2, "gradients": 2e-1},
}
"""Loss: absolute. The others: relative. Experts in bfloat16 may send a token elsewhere, hence the room for gradients."""
LEARNING_RATE = 1e-3
TIMEOUT_S = 240.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCES), choices=TOLERANCES)
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    device, most = ("cuda", min(num_gpus, 2)) if num_gpus else ("cpu", 2)
    print(f"{num_gpus} GPUs, torch {torch.__version__}: {torch.cuda.get_device_name() if num_gpus else 'CPU'}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {}
        for model in options.models:
            random_model.make(model, folder / model, "cpu")
            batch(folder / f"{model}.safetensors")
            jobs[model, "float32", "cpu"] = make_job(folder, model, "float32", "cpu", {})
            for dtype in options.dtypes:
                for layout, trainer in LAYOUTS[model].items():
                    if trainer.get("num_processes", 1) <= most:
                        jobs[model, dtype, layout] = make_job(folder, model, dtype, device, trainer)
        # Ranks on a CPU prepare torch for it, so a process works on one kind of device only.
        for num_ranks, on in ((1, "cpu"), (1, "cuda"), (2, "cpu"), (2, "cuda")):
            run([job for job in jobs.values() if (job.trainer.num_processes, job.device) == (num_ranks, on)], num_ranks, on)
        for (model, dtype, layout), job in jobs.items():
            reference = jobs[model, dtype, "1"] if layout not in ("1", "cpu") else jobs[model, "float32", "cpu"]
            found[f"{model} {dtype} {layout}"] = compare(job, reference, TOLERANCES[dtype])
            print(f"{model:10} {dtype:9} {layout:24} {found[f'{model} {dtype} {layout}']}", flush=True)
    write_json(options.out, found)
    num_bad = sum(not case["ok"] for case in found.values())
    print(f"{len(found) - num_bad} passed, {num_bad} failed")
    return 1 if num_bad else 0


def batch(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (24,), generator=generator).tolist()
    total = sum(lengths)
    is_loss = torch.cat([torch.arange(length) >= 8 for length in lengths])
    advantages = torch.cat([torch.randn(1, generator=generator).expand(length) for length in lengths])
    save_file(
        {
            "tokens": torch.randint(0, 2048, (total,), generator=generator),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "loss_mask": is_loss.to(torch.uint8),
            "rollout_logprobs": torch.where(is_loss, -7.8 + 0.3 * torch.randn(total, generator=generator), 0.0),
            "advantages": torch.where(is_loss, advantages, 0.0),
        },
        path,
        {"adapter_version": "0", "adapter_sha256": "base", "temperature": "0.8"},
    )


def make_job(folder: Path, model: str, dtype: str, device: str, trainer: dict[str, Any]) -> TrainJob:
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "out").mkdir()
    job = TrainJob(
        model_path=folder / model,
        base_model_id=model,
        adapter_path=None,
        adapter_version=0,
        num_optimizer_steps=0,
        adapter_sha256="base",
        batch_path=folder / f"{model}.safetensors",
        output_dir=place / "out",
        result_path=place / "result.json",
        seed=0,
        num_threads=1,
        device=device,  # type: ignore[arg-type]
        trainer=TrainerConfig.model_validate({"dtype": dtype, "learning_rate": LEARNING_RATE, "timeout_s": TIMEOUT_S} | trainer),
    )
    write_json(place / "job.json", job.model_dump(mode="json"))
    return job


def run(jobs: list[TrainJob], num_ranks: int, device: str) -> None:
    """All jobs of so many ranks one after the other in the same processes, since imports cost more than they do."""
    if not jobs:
        return
    paths = [str(job.result_path.parent / "job.json") for job in jobs]
    begin = ports.free_port(29600)
    with_ports = [f"{begin + i}:{path}" for i, path in enumerate(paths)]
    program = [sys.executable, str(ROOT / "tests/infra/megatron/run_jobs.py")]
    inherited = os.environ.get("PYTHONPATH", "")
    shared = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{inherited}", "OMP_NUM_THREADS": "1"} | (
        {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    )
    ranks = [
        subprocess.Popen([*program, str(r), str(num_ranks), *with_ports], env=shared | {"LOCAL_RANK": str(r)}, cwd=ROOT)
        for r in range(num_ranks)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"{num_ranks} ranks on {device}: no end after {TIMEOUT_S:g} s", flush=True)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def compare(job: TrainJob, reference: TrainJob, tolerance: dict[str, float]) -> dict[str, Any]:
    if not (job.result_path.exists() and reference.result_path.exists()):
        return {"ok": False, "error": "no result"}
    mine, other = (TrainResult.model_validate_json(x.result_path.read_bytes()).metrics for x in (job, reference))
    moments, expected = (load_file(x.output_dir / MOMENTS["exp_avg"]) for x in (job, reference))
    distance = sum(float((moments[n] - expected[n]).double().square().sum()) for n in moments) ** 0.5
    size = sum(float(expected[n].double().square().sum()) for n in moments) ** 0.5
    adapter, expected_adapter = (load_file(x.output_dir / ADAPTER_WEIGHTS) for x in (job, reference))
    apart = torch.cat([(adapter[n] - expected_adapter[n]).abs().flatten() for n in adapter])
    found: dict[str, Any] = {
        "loss": abs(mine["train/loss"] - other["train/loss"]),
        "grad_norm": abs(mine["train/grad_norm"] / other["train/grad_norm"] - 1),
        "gradients": distance / size,
    }
    ok = all(value <= tolerance[name] for name, value in found.items())
    # In steps of Adam: where a gradient is nothing but noise, one whole step and its opposite are apart by 2.
    found |= {"adapter_mean_steps": float(apart.mean()) / LEARNING_RATE, "adapter_max_steps": float(apart.max()) / LEARNING_RATE}
    return {name: round(value, 8) for name, value in found.items()} | {"ok": ok}


if __name__ == "__main__":
    sys.exit(main())
