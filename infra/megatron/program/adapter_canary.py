"""Write the canary of an adapter that the trainer did not make, and that a run starts from:

python -m infra.megatron.program.adapter_canary JOB.json OUT

The canary's text is the first sequence of JOB.json's batch. The program runs in one process, on the CPU: it needs no memory of the GPU.
"""

import os
import sys
from pathlib import Path

from infra.megatron.lora.peft_files import check_adapter
from infra.megatron.loss.batch import read_batch
from infra.megatron.model import parallel
from infra.megatron.program.canary import CanaryProbe
from infra.megatron.program.check_job import read_job
from infra.megatron.program.token_logprobs import in_one_process, loaded
from infra.megatron.protocol.job import TrainJob
from infra.models.architecture import read_architecture
from infra.store import files

USAGE = "usage: python -m infra.megatron.program.adapter_canary JOB.json OUT.json"


def write_canary(job: TrainJob, out: Path) -> None:
    """Write the canary of a job's adapter. Raises ValueError for an adapter that the job does not describe."""
    batch = read_batch(job.batch_path)
    check_adapter(job, read_architecture(job.model_path))
    net, place = loaded(job)
    probe = CanaryProbe(net, batch, place)
    probe.begin()
    files.write_json(out, probe.end().model_dump())
    parallel.stop()


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write(f"{USAGE}\n")
        return 2
    try:
        write_canary(in_one_process(read_job(Path(arguments[0]))), Path(arguments[1]))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # as the trainer program does: shutting torch down takes a second or more
