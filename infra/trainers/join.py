"""Another machine's ranks of one training job, where RATCHET_TRAINER_NODES is 2 or more:

    RATCHET_TRAINER_NODES=2 RATCHET_TRAINER_RENDEZVOUS=HOST:PORT python -m infra.trainers.join JOB.json NODE_RANK

with the same two settings as the worker's, which is node 0 and says this command in its log. JOB.json and what it names lie on a file
system that all nodes share. It waits for the others, takes part in the job and leaves with its exit code.
"""

import os
import sys
from pathlib import Path

from pydantic import ValidationError

from infra.megatron.job import TrainJob
from infra.settings import CHECKOUT, settings
from infra.trainers import torchrun

USAGE = "usage: python -m infra.trainers.join JOB.json NODE_RANK"


def argv_of(arguments: list[str]) -> tuple[TrainJob, list[str]]:
    """Raises ValueError for what cannot be joined."""
    if len(arguments) != 2 or not arguments[1].isdigit():
        raise ValueError(USAGE)
    path, node, nodes = Path(arguments[0]).absolute(), int(arguments[1]), settings().trainer_nodes
    if not 1 <= node < nodes:
        raise ValueError(
            f"NODE_RANK {node} is none of 1 to {nodes - 1} (RATCHET_TRAINER_NODES is {nodes}, node 0 is the worker's)"
        )
    try:
        job = TrainJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"{path} is no job: {error}") from error
    return job, torchrun.command(job, str(path), node_rank=node)


def main() -> int:
    try:
        job, argv = argv_of(sys.argv[1:])
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    os.chdir(CHECKOUT)
    os.execve(argv[0], argv, os.environ | torchrun.environment(job))


if __name__ == "__main__":
    sys.exit(main())
