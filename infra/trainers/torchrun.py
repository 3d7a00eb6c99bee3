"""A fresh torchrun for each step.

train task --job.json--> torchrun --> ranks of `python -m infra.megatron` --result.json--> train task
"""

import logging
import os
import secrets
from pathlib import Path

from infra.failures import DISK_FULL
from infra.machine import devices
from infra.megatron.protocol.job import MEETING_FILE, TrainJob, TrainResult
from infra.processes import children, gpu_programs, kernel_caches, logs
from infra.settings import CHECKOUT, main_python, settings
from infra.store.files import PRIVATE, fresh_folder, read_json, write_json
from infra.store.layout import TrainFolder
from infra.telemetry import program_versions
from infra.trainers import log_parser
from infra.trainers.interface import TrainerLost, TrainerOutOfMemory, TrainingFailed

log = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)

MEETING = "meeting"
"""Folder next to a job, for one start of torchrun."""
# Perf: 42 GiB given back in 0.02 s instead of 0.09 to 0.15, taken in 0.01 s instead of 0.11 to 0.14 (H200, docs/history/log.md).
ALLOCATOR = "expandable_segments:True,large_segment_size_mb:256"
"""Configuration of torch's allocator on a GPU. Micro-batches differ in size, and growing segments avoid fragmentation. Segments grow and
are freed in pieces: for 42 GiB, torch's 20 MiB pieces take 0.10 to 0.15 s each way, these take 0.01 and 0.02 s
(docs/history/log.md, 2026-11-22)."""


class TorchrunTrainer:
    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        job_path, log_path = TrainFolder(folder).job, TrainFolder(folder).log
        write_json(job_path, job.model_dump(mode="json"))
        program_versions.warn_of_trainer()
        meeting = fresh_folder(folder / MEETING, PRIVATE)
        try:
            with log_parser.progress_of_log() as on_log_line:
                gpu_programs.run(
                    "trainer",
                    command(job, str(job_path), meeting=meeting),
                    log_path,
                    timeout_s=job.trainer.timeout_s,
                    env=environment(job, meeting),
                    cwd=CHECKOUT,
                    on_line=on_log_line,
                )
        except children.ProgramTimedOut as error:
            raise TrainerLost(str(error)) from error
        except children.ProgramFailed as error:
            raise classified(error, log_path) from error
        if not job.result_path.exists():
            raise TrainerLost(f"the trainer ended without {job.result_path}; the end of {log_path}:\n{logs.last_lines(log_path)}")
        return TrainResult.model_validate(read_json(job.result_path))


def command(job: TrainJob, *arguments: str, meeting: Path) -> list[str]:
    """Return torchrun's command line for this machine alone.

    meeting: An empty private folder in which the ranks find each other.
    """
    # torch unpickles the rendezvous state. A TCP store listens on all interfaces, so anybody could put a pickle of their own there.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(meeting / "agent")]
    rendezvous += ["--rdzv-id", secrets.token_hex(16)]
    return _command(job, rendezvous, arguments, nodes=1)


def command_on_cluster(job: TrainJob, argument: str, *, attempt: str, nodes: int, endpoint: str, node_rank: int) -> list[str]:
    """Return torchrun's command line for one of several nodes of a cluster.

    attempt: Id by which the ranks of one start find each other.
    endpoint: HOST:PORT of the first node.
    """
    # Static: rank 0, whose output is the log, is on node 0, and equal jobs get equal ranks. It unpickles nothing.
    rendezvous = ["--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--node-rank", str(node_rank), "--rdzv-id", attempt]
    return _command(job, rendezvous, (argument,), nodes=nodes)


def _command(job: TrainJob, rendezvous: list[str], arguments: tuple[str, ...], *, nodes: int) -> list[str]:
    python = str(settings().trainer_python or main_python())
    on_each = ["--nnodes", str(nodes), "--nproc-per-node", str(job.trainer.num_processes // nodes)]
    return [python, "-m", "torch.distributed.run", *on_each, *rendezvous, "-m", "infra.megatron", *arguments]


def environment(job: TrainJob, meeting: Path | None = None) -> dict[str, str]:
    """Return the variables that torchrun gets in addition to this process's environment. meeting: as in `command`; None: on one of several nodes."""
    shared = {
        "OMP_NUM_THREADS": str(job.num_threads),
        "PYTHONHASHSEED": "0",
        # Perf: threads that spin made a training step take 19.8 s instead of 0.8 s, with load 13 on 2 CPU cores (docs/history/log.md).
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **kernel_caches.variables(program_versions.of_trainer(), has_bytecode=program_versions.trainer_has_bytecode()),
    }
    on_gpu = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
    if gpus := devices.trainer_gpus(job.trainer):
        on_gpu |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    on_cpu = {"CUDA_VISIBLE_DEVICES": ""}
    if meeting is not None:
        # Without the switch torchrun opens a TCP store of its own for the ranks, even if they meet in a file.
        shared |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", MEETING_FILE: str(meeting / "ranks")}
        shared |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return shared | (on_cpu if job.device == "cpu" else on_gpu)


def classified(error: children.ProgramFailed, log_path: Path) -> Exception:
    """Return the class of failure of a torchrun that ended with an error: out of memory, a full disk, killed (TrainerLost), or any other
    (TrainingFailed). log_path: its output."""
    output = log_path.read_text(errors="replace")
    if cause := known_cause(str(error), output, log_path):
        return cause
    if (error.exit_code is not None and error.exit_code < 0) or "Signal 9 (SIGKILL)" in output or "Signal 15 (SIGTERM)" in output:
        return TrainerLost(str(error))
    return TrainingFailed(str(error))


def known_cause(message: str, output: str, log_path: Path) -> Exception | None:
    """Return the error that a program's output reports: out of memory, or a full disk. None for any other cause."""
    if any(sign in output for sign in OUT_OF_MEMORY):
        return TrainerOutOfMemory(message)
    for number in DISK_FULL:
        if os.strerror(number) in output:
            return OSError(number, f"{os.strerror(number)}: the trainer could not write; its log is {log_path}")
    return None
