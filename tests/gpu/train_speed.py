"""How fast the trainer is here: several steps on a synthetic batch in one program that stays, and in programs of their own.

    python tests/gpu/train_speed.py OUT.json --model FOLDER [--tokens 65536] [--seq 1024] [--rank 16] [--repeat 3] [--microbatch 8192]

A micro-batch that does not fit is reported and the next one is tried. OUT.json is rewritten after each part, so that a run which is
cut off leaves what it had found. Without a GPU it computes on the CPU (a tiny model, then). `--profile` also writes OUT.profile.txt,
the kernels of one step by time.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infra.trainers.torchrun import ALLOCATOR

# As the trainer's programs have it; before torch looks.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)

import torch
from safetensors.torch import save_file

from infra.config import TrainerConfig
from infra.machine import ports
from infra.megatron.__main__ import run
from infra.megatron.program.session import TrainerSession
from infra.megatron.protocol.job import ADAPTER_WEIGHTS, TrainJob, TrainResult
from infra.models.architecture import read_architecture
from infra.settings import settings
from infra.store.digests import sha256_of
from infra.store.files import write_json

OUT_OF_MEMORY = -1


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence; with --spread their mean")
    parser.add_argument("--spread", action="store_true", help="sequences of 0.5 to 1.5 times --seq, as sampled ones differ")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--microbatch", type=int, nargs="+", default=[8192], help="tokens of a micro-batch; several are tried in turn"
    )
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--sleep-weights", choices=("host", "gpu", "disk"), default="host")
    parser.add_argument("--no-fresh", action="store_true", help="leave out the steps in programs of their own")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def main() -> None:
    o = options()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "options": {name: str(value) for name, value in vars(o).items()},
        "steps": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["RATCHET_WORKSPACE"] = str(folder / "workspace")
        settings.cache_clear()
        pretend_torchrun()
        session, last = TrainerSession(stays=True), None
        for microbatch in o.microbatch:
            for _ in range(o.repeat):
                job = make_job(folder, len(found["steps"]), o, microbatch, device, last)
                found["steps"].append({"microbatch": microbatch} | step(job, session))
                report(o.out, found)
                if not job.result_path.exists():
                    break
                if last:  # adapters of many experts are gigabytes
                    shutil.rmtree(last.output_dir)
                last = job
        if o.profile:
            few = argparse.Namespace(**vars(o) | {"tokens": min(o.tokens, 2 * o.microbatch[0])})
            profile(make_job(folder, 998, few, o.microbatch[0], device, last), session, o.out.with_suffix(".profile.txt"))
        del session
        release(device)
        if not o.no_fresh:
            found["fresh"] = fresh(make_job(folder, 999, o, o.microbatch[0], device, last), folder)
            print({"fresh": found["fresh"]}, flush=True)
            found["resident"] = resident(folder, o, device, last)
            print({"resident": found["resident"]}, flush=True)
            write_json(o.out, found)
    best = max(found["steps"], key=lambda s: s.get("tokens_per_s") or 0)
    print(f"best: {best.get('tokens_per_s')} tokens/s, MFU {best.get('mfu')}, peak {best.get('peak_memory_gib')} GiB")
    print("done" if all(s["exit_code"] in (0, OUT_OF_MEMORY) for s in found["steps"]) else "SOME STEPS FAILED")


def report(out: Path, found: dict[str, Any]) -> None:
    write_json(out, found)
    print(found["steps"][-1], flush=True)


def lengths_of(o: argparse.Namespace) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < o.tokens:
        length = int(o.seq * (0.5 + torch.rand(1, generator=generator).item())) if o.spread else o.seq
        lengths.append(max(4, min(length, o.tokens - sum(lengths))))
    return lengths


def make_job(folder: Path, number: int, o: argparse.Namespace, microbatch: int, device: str, after: TrainJob | None) -> TrainJob:
    """A step on random tokens, the first quarter of each sequence as its prompt; it goes on from the adapter of the job before."""
    place = folder / f"job{number}"
    (place / "out").mkdir(parents=True)
    lengths, generator = lengths_of(o), torch.Generator().manual_seed(number)
    total = sum(lengths)
    is_loss = torch.cat([torch.arange(length) >= max(1, length // 4) for length in lengths])
    advantages = torch.cat([torch.randn(1, generator=generator).expand(length) for length in lengths])
    vocabulary = read_architecture(o.model).vocab_size
    version, digest = (after.adapter_version + 1, sha256_of(after.output_dir / ADAPTER_WEIGHTS)) if after else (0, "base")
    save_file(
        {
            "tokens": torch.randint(0, vocabulary, (total,), generator=generator),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "loss_mask": is_loss.to(torch.uint8),
            "rollout_logprobs": torch.where(is_loss, -torch.tensor(float(vocabulary)).log(), 0.0),
            "advantages": torch.where(is_loss, advantages, 0.0),
        },
        place / "batch.safetensors",
        {"adapter_version": str(version), "adapter_sha256": digest, "temperature": "1.0"},
    )
    trainer = TrainerConfig(
        lora={"rank": o.rank, "alpha": 2 * o.rank},
        max_tokens_per_microbatch=microbatch,
        recompute=o.recompute,
        sleep_weights=o.sleep_weights,
        learning_rate=1e-5,
    )  # type: ignore[arg-type]
    job = TrainJob(
        model_path=o.model,
        base_model_id="random",
        adapter_path=after.output_dir if after else None,
        adapter_version=version,
        num_optimizer_steps=version,
        adapter_sha256=digest,
        batch_path=place / "batch.safetensors",
        output_dir=place / "out",
        result_path=place / "result.json",
        seed=0,
        num_threads=8 if device == "cuda" else 1,
        device=device,  # type: ignore[arg-type]
        trainer=trainer,
    )
    write_json(place / "job.json", job.model_dump(mode="json"))
    return job


def step(job: TrainJob, session: TrainerSession) -> dict[str, Any]:
    begin = time.perf_counter()
    found: dict[str, Any] = {"exit_code": None}
    try:
        found["exit_code"] = run(job.result_path.parent / "job.json", session)
    except torch.OutOfMemoryError as error:
        print(f"out of memory with micro-batches of {job.trainer.microbatch_tokens} tokens: {str(error)[:300]}", flush=True)
        found["exit_code"] = OUT_OF_MEMORY
    if found["exit_code"] == OUT_OF_MEMORY:  # outside, where the error's frames no longer hold its tensors
        session.teardown()
    found["job_s"] = round(time.perf_counter() - begin, 3)
    asleep = session.sleep()
    found |= {"sleep_s": round(asleep.seconds, 3), "held_asleep_gib": round(asleep.held_bytes / 2**30, 3)}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["driver_used_asleep_gib"] = round((total - free) / 2**30, 2)
    return found | figures(job)


def figures(job: TrainJob) -> dict[str, Any]:
    if not job.result_path.exists():
        return {}
    result = TrainResult.model_validate_json(job.result_path.read_bytes())
    return {
        "tokens_per_s": round(result.metrics["train/tokens_per_s"], 1),
        "mfu": result.metrics.get("train/mfu"),
        "peak_memory_gib": round(result.peak_memory_gib, 2),
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "loss": result.metrics["train/loss"],
        "grad_norm": result.metrics["train/grad_norm"],
        "entropy": result.metrics["train/entropy"],
    }


def profile(job: TrainJob, session: TrainerSession, out: Path) -> None:
    """The kernels of one step by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    try:
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        with profiled(activities=kinds) as profiler:
            run(job.result_path.parent / "job.json", session)
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        out.write_text(profiler.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90))
    except Exception as error:  # noqa: BLE001  # the figures count, this is an extra
        out.write_text(f"no profile: {error!r}")


RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pretend_torchrun() -> None:
    values = ("0", "0", "1", "127.0.0.1", str(ports.free_port(29511)))
    os.environ.update(zip(RANK, values, strict=True))


def release(device: str) -> None:
    """This process must not hold the GPU while another program trains."""
    import gc

    from infra.megatron.model import parallel

    parallel.stop()
    for name in RANK:
        del os.environ[name]
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def fresh(job: TrainJob, folder: Path) -> dict[str, Any]:
    """The same by a torchrun of its own; what its phases do not say is start and end."""
    from infra.trainers.torchrun import TorchrunTrainer

    begin = time.perf_counter()
    try:
        TorchrunTrainer().train(job, folder)
    except RuntimeError as error:
        return {"error": str(error)[-2000:]}
    wall = time.perf_counter() - begin
    found = figures(job)
    return {"wall_s": round(wall, 2), "unaccounted_s": round(wall - sum(found["seconds"].values()), 2)} | found


def resident(folder: Path, o: argparse.Namespace, device: str, after: TrainJob | None) -> list[dict[str, Any]]:
    """Two steps by the product's persistent trainer, files and torchrun included: the second finds it asleep."""
    from infra.megatron.protocol.mailbox import Mailbox
    from infra.trainers.resident import PersistentTrainer, recorded, stop_recorded

    found: list[dict[str, Any]] = []
    try:
        for number in (1000, 1001):
            job = make_job(folder, number, o, o.microbatch[0], device, after)
            begin = time.perf_counter()
            PersistentTrainer().train(job, job.result_path.parent)
            wall = time.perf_counter() - begin
            state = recorded()
            scores = Mailbox(state.folder).state() if state else None
            asleep = (
                {"sleep_s": scores.sleep_s, "held_gib": scores.held_bytes / 2**30} if scores else {"error": "it did not stay"}
            )
            found.append({"wall_s": round(wall, 2), **asleep, **figures(job)})
            after = job
    except RuntimeError as error:
        found.append({"error": str(error)[-2000:]})
    finally:
        begin = time.perf_counter()
        stop_recorded()
        found.append({"end_s": round(time.perf_counter() - begin, 2)})
    return found


if __name__ == "__main__":
    main()
