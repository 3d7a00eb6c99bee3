"""Run another machine's ranks of multi-node training jobs, where RATCHET_TRAINER_NODES is 2 or more:

    RATCHET_TRAINER_NODES=2 RATCHET_TRAINER_RENDEZVOUS=HOST:PORT python -m infra.trainers.join_node JOB.json NODE_RANK
    ...                                                          python -m infra.trainers.join_node --follow NODE_RANK

The two settings must equal those of the worker. The worker is node 0 and logs the first command. JOB.json and the files that it names must lie
on a file system that all nodes share. The program waits for the other nodes, takes part in the job and exits with its exit code. With
--follow it takes part in one job after another, as they appear in the workspace, until it is ended.

worker's torchrun trainer --trainer-call.json--> --follow on each other node --torchrun--> the job's ranks there
"""

import logging
import os
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from infra.megatron.protocol.job import TrainJob
from infra.processes import child_environment, children
from infra.processes.children import ProcessRef
from infra.settings import CHECKOUT, settings
from infra.store.layout import Workspace
from infra.trainers import multinode_jobs, torchrun

log = logging.getLogger(__name__)

USAGE = "usage: python -m infra.trainers.join_node JOB.json NODE_RANK | --follow NODE_RANK"


def argv_of(arguments: list[str]) -> tuple[TrainJob, list[str]]:
    """Parse the arguments. Raises ValueError for a job that cannot be joined."""
    if len(arguments) != 2 or not arguments[1].isdigit():
        raise ValueError(USAGE)
    path, node = Path(arguments[0]).absolute(), node_of(arguments[1])
    try:
        job = TrainJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"{path} is no job: {error}") from error
    return job, torchrun.command(job, str(path), node_rank=node)


def node_of(text: str) -> int:
    """Parse a node rank. Raises ValueError for a number that is no other node's."""
    node, nodes = int(text), settings().trainer_nodes
    if not 1 <= node < nodes:
        raise ValueError(
            f"NODE_RANK {node} is none of 1 to {nodes - 1} (RATCHET_TRAINER_NODES is {nodes}, node 0 is the worker's)"
        )
    return node


def follow(node: int) -> None:
    """Take part in every job that is announced. Programs of an earlier call are ended first."""
    log_path = Workspace.here().logs / f"trainer-node-{node}.log"
    log.info("node %d waits for training jobs in %s; their output goes to %s", node, settings().workspace, log_path)
    program: ProcessRef | None = None
    try:
        for call in multinode_jobs.progress_of_log():
            if program:
                children.stop(program)
            job, argv = argv_of([str(call.job), str(node)])
            log.info("node %d takes part in %s", node, call.job)
            program = children.start(argv, log_path, torchrun.environment(job), CHECKOUT, inherits=child_environment.passed_on())
    finally:
        if program:
            children.stop(program)


def main() -> int:
    try:
        if len(sys.argv) == 3 and sys.argv[1] == "--follow" and sys.argv[2].isdigit():
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            follow(node_of(sys.argv[2]))
        job, argv = argv_of(sys.argv[1:])
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    os.chdir(CHECKOUT)
    os.execve(argv[0], argv, child_environment.passed_on() | torchrun.environment(job))


if __name__ == "__main__":
    sys.exit(main())
