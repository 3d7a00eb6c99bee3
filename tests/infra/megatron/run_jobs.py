"""One rank that runs several jobs in one process, since imports cost more than tiny jobs: `run_jobs.py RANK WORLD_SIZE PORT:JOB ...`

`PORT:JOB,JOB`: these one after the other as in a resident program.
"""

import os
import sys
from pathlib import Path

from infra.megatron.__main__ import main, run


def run_resident(jobs: list[str]) -> int:
    from infra.megatron.program.session import TrainerSession

    session = TrainerSession(stays=True)
    codes = [run(Path(job), session) for job in jobs]
    session.end()
    return max(codes)


def run_all(arguments: list[str]) -> int:
    rank, world_size, *jobs = arguments
    for job in jobs:
        port, paths = job.split(":", 1)
        # A port of its own, because a rendezvous finds the last job's keys otherwise.
        os.environ |= {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        path, *others = paths.split(",")
        if code := run_resident([path, *others]) if others else main([path]):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))
