"""A fresh torchrun for each step.

train task --job.json--> torchrun --> ranks of `python -m infra.megatron` --result.json--> train task
"""

import logging
import os
from pathlib import Path

from infra import processes
from infra.files import read_json, write_json
from infra.megatron.job import TrainJob, TrainResult
from infra.settings import CHECKOUT, main_python
from infra.trainers.base import TrainerLost, TrainerOutOfMemory, TrainingFailed

log = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


class TorchrunTrainer:
    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        job_path, log_path = folder / "job.json", folder / "trainer.log"
        write_json(job_path, job.model_dump(mode="json"))
        try:
            processes.run(
                command(job, str(job_path)),
                log_path,
                timeout_s=job.trainer.timeout_s,
                env=environment(job),
                cwd=CHECKOUT,
                on_line=lambda line: log.info("trainer: %s", line),
            )
        except processes.ProgramTimedOut as error:
            raise TrainerLost(str(error)) from error
        except processes.ProgramFailed as error:
            raise _classified(error, log_path) from error
        if not job.result_path.exists():
            raise TrainerLost(
                f"the trainer ended without {job.result_path}; the end of {log_path}:\n{processes.last_lines(log_path)}"
            )
        return TrainResult.model_validate(read_json(job.result_path))


def command(job: TrainJob, *arguments: str) -> list[str]:
    # A rendezvous on a port that the system chooses: two trainers on one machine never meet.
    flags = [
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(job.trainer.num_processes),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    return [str(main_python()), "-m", "torch.distributed.run", *flags, "-m", "infra.megatron", *arguments]


def environment(job: TrainJob) -> dict[str, str]:
    shared = {
        "OMP_NUM_THREADS": str(job.num_threads),
        "PYTHONHASHSEED": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    # Micro-batches differ in size; pieces of memory that can grow leave no holes that the next one does not fit into.
    on_gpu = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    return shared | (on_cpu if job.device == "cpu" else on_gpu)


def _classified(error: processes.ProgramFailed, log_path: Path) -> Exception:
    output = log_path.read_text(errors="replace")
    if says_out_of_memory(output):
        return TrainerOutOfMemory(str(error))
    if (error.exit_code is not None and error.exit_code < 0) or "Signal 9 (SIGKILL)" in output or "Signal 15 (SIGTERM)" in output:
        return TrainerLost(str(error))
    return TrainingFailed(str(error))


def says_out_of_memory(output: str) -> bool:
    return any(sign in output for sign in OUT_OF_MEMORY)
