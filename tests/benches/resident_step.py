"""Seconds by phase of steps in a persistent trainer, each going on from the one before, and until it says that it is asleep.

    PYTHONPATH=. python tests/benches/resident_step.py FOLDER [--megabytes 160] [--steps 6] [--sleep-weights gpu]

A model of 4 layers with random weights and an adapter of so many megabytes on it (optimizer state is twice that), one short batch: on a
CPU the phase `train` is none of a real step, `adapter` and `export` move the bytes of one. Medians without the first two steps.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
BYTES_OF_RANK = 4 * 4 * (2 * 2048 + 2 * 1536 + 3 * 5120)
"""float32, of 4 layers: each projection's width in and out."""


def make_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if not folder.exists():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).float().save_pretrained(folder)
    return folder


def make_batch(path: Path, version: int, sha256: str) -> Path:
    tokens = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(version))
    is_loss = torch.arange(64) >= 8
    tensors = {
        "tokens": tokens,
        "cu_seqlens": torch.tensor([0, 64]),
        "loss_mask": is_loss.to(torch.uint8),
        "rollout_logprobs": -6.2 * is_loss,
        "advantages": 1.0 * is_loss,
    }
    save_file(tensors, path, {"adapter_version": str(version), "adapter_sha256": sha256, "temperature": "1.0"})
    return path


def job_of(folder: Path, step: int, before: Path | None, said: dict[str, str], options: argparse.Namespace) -> Any:
    """A TrainJob that goes on from `before`, whose files have the digests `said`."""
    from infra.megatron.protocol.job import TrainJob

    root = options.folder.absolute()
    lora = {"rank": options.megabytes * 10**6 // BYTES_OF_RANK, "alpha": 32}
    return TrainJob.model_validate(
        {
            "model_path": make_model(root / "model"),
            "base_model_id": "bench",
            "adapter_path": before,
            "adapter_version": step,
            "adapter_sha256": said["weights"],
            "moments_sha256": {which: sha256 for which, sha256 in said.items() if which != "weights"},
            "num_optimizer_steps": step,
            "batch_path": make_batch(folder / "batch.safetensors", step, said["weights"]),
            "output_dir": folder / "adapter",
            "result_path": folder / "result.json",
            "seed": 0,
            "num_threads": 2,
            "device": options.device,
            "trainer": {"lora": lora, "mode": "persistent", "sleep_weights": options.sleep_weights},
        }
    )


def steps(options: argparse.Namespace) -> list[dict[str, float]]:
    from infra.megatron.protocol.job import ADAPTER_WEIGHTS
    from infra.megatron.protocol.optimizer_files import MOMENTS
    from infra.trainers import resident

    before: Path | None = None
    said, found = {"weights": "base"}, list[dict[str, float]]()
    for step in range(options.steps):
        folder = options.folder.absolute() / f"step-{step}-{time.time_ns()}"
        (folder / "adapter").mkdir(parents=True)
        job, begin = job_of(folder, step, before, said, options), time.perf_counter()
        result = resident.PersistentTrainer().train(job, folder)
        found.append(result.seconds | {"whole": time.perf_counter() - begin})
        before = job.output_dir
        said = {which: result.files[name].sha256 for which, name in {"weights": ADAPTER_WEIGHTS, **MOMENTS}.items()}
        print(step, {name: round(seconds, 3) for name, seconds in found[-1].items()}, said["exp_avg"][:12], flush=True)
    resident.stop_recorded()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=160)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sleep-weights", default="gpu")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    os.environ["RATCHET_WORKSPACE"] = str(options.folder.absolute())
    settled = steps(options)[2:]
    print("medians", {name: round(median(each[name] for each in settled), 3) for name in settled[-1]})


if __name__ == "__main__":
    main()
