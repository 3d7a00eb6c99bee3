"""One rank that runs several jobs in one process, since imports cost more than tiny jobs: `run_jobs.py RANK WORLD_SIZE PORT:JOB ...`"""

import os
import sys

from infra.megatron.__main__ import main

if __name__ == "__main__":
    rank, world_size, *jobs = sys.argv[1:]
    for job in jobs:
        port, path = job.split(":", 1)
        # A port of its own, because a rendezvous finds the last job's keys otherwise.
        os.environ |= {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if code := main([path]):
            sys.exit(code)
