"""The trainer on several nodes of a cluster: one torchrun on each, which meet at the first node's address.

train task --job.json--> agent of each node --torchrun--> ranks of `python -m infra.megatron` --result.json--> train task

Job, batch and results are files that all nodes see. The number of ranks never changes: when a node is lost, the next attempt puts as many
ranks on those that are left. Equal numbers of ranks and threads give equal bits, on any number of nodes.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infra.cluster import connection, node_agent
from infra.cluster.nodes import ClusterNode
from infra.config import TrainerConfig
from infra.failures import NodeLost, NoNodesForRanks, TrainerLost, TrainerNodeLost, TrainingFailed
from infra.machine import ports
from infra.megatron.protocol.job import TrainJob, TrainResult
from infra.processes import children, logs
from infra.processes.children import ProcessRef
from infra.settings import CHECKOUT, host_port
from infra.store.files import PRIVATE, fresh_folder, read_json, write_json
from infra.store.layout import TrainFolder
from infra.telemetry import program_versions
from infra.trainers import log_parser, torchrun

log = logging.getLogger(__name__)

POLL_S = 0.3
SETTLE_S = 10.0
"""Seconds in which the other nodes' torchrun ends after the first that failed: the cause may be in its output."""
RENDEZVOUS_PORTS = range(29400, 30400)
"""First choices. Each attempt draws one: a rank of an earlier attempt, on a node that was cut off and is back, does not find the new ones."""


class Agent(NamedTuple):
    """One node's torchrun."""

    node: ClusterNode
    process: ProcessRef
    log_path: Path


class ClusterTrainer:
    """A Trainer; see infra/trainers/interface.py."""

    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        job_path, log_path = TrainFolder(folder).job, logs.fresh_log(TrainFolder(folder).log)
        write_json(job_path, job.model_dump(mode="json"))
        program_versions.warn_of_trainer()
        nodes = layout(job.trainer.num_processes, connection.living())
        log.info("training with %d ranks on %s", job.trainer.num_processes, ", ".join(node.address for node in nodes))
        agents: list[Agent] = []
        try:
            _start(job, job_path, log_path, nodes, agents)
            log_path.touch()
            with log_parser.progress_of_log() as on_log_line, logs.followed(log_path, on_log_line, poll_s=0.1):
                _wait(agents, job.trainer.timeout_s)
        except NodeLost as lost:
            raise TrainerNodeLost(f"{lost}; the trainer is started again on the nodes that are left") from lost
        finally:
            _end(agents)
        if not job.result_path.exists():
            raise TrainerLost(f"the trainer ended without {job.result_path}; the end of {log_path}:\n{logs.last_lines(log_path)}")
        return TrainResult.model_validate(read_json(job.result_path))


def check_mode(config: TrainerConfig) -> None:
    """Raises ValueError for a persistent trainer: over several nodes each step has a fresh one."""
    if config.mode == "persistent":
        raise ValueError("trainer.mode 'persistent' with RATCHET_CLUSTER_ADDRESS: over several nodes take 'per_step' or 'auto'")


def layout(num_processes: int, living: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes for a number of ranks: as many nodes as share them evenly and have a GPU for each of theirs, if they have any.

    Raises:
        NoNodesForRanks: if they do not fit on the living nodes.
    """
    for count in range(min(num_processes, len(living)), 0, -1):
        on_each, rest = divmod(num_processes, count)
        roomy = [node for node in living if not node.num_gpus or node.num_gpus >= on_each]
        if not rest and len(roomy) >= count:
            return roomy[:count]
    if not living:
        raise NoNodesForRanks("all nodes that this run used are lost: give the same command again, it uses those that live then")
    there = ", ".join(f"{node.address} ({node.num_gpus} GPUs)" for node in living)
    raise NoNodesForRanks(
        f"trainer.num_processes {num_processes} does not fit evenly on the living nodes {there}: add a node, or lower it (another number of "
        "ranks gives other last bits)"
    )


def _start(job: TrainJob, job_path: Path, log_path: Path, nodes: Sequence[ClusterNode], agents: list[Agent]) -> None:
    """Start a torchrun on each node. Each is added to agents at once, so that it can be ended."""
    first = nodes[0]
    endpoint = host_port(first.address, first.call(ports.free_port, secrets.choice(RENDEZVOUS_PORTS), first.address))
    attempt = secrets.token_hex(16)
    for rank, node in enumerate(nodes):
        if len(nodes) == 1:
            meeting = fresh_folder(job_path.with_name(torchrun.MEETING), PRIVATE)
            argv = torchrun.command(job, str(job_path), meeting=meeting)
            env = torchrun.environment(job, meeting)
        else:
            argv = torchrun.command_on_cluster(
                job, str(job_path), attempt=attempt, nodes=len(nodes), endpoint=endpoint, node_rank=rank
            )
            interface = node.call(node_agent.interface_of, node.address)
            env = torchrun.environment(job) | (
                dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface) if interface else {}
            )
        path = log_path if rank == 0 else logs.fresh_log(log_path.with_name(f"{log_path.stem}-{rank}{log_path.suffix}"))
        agents.append(Agent(node, node.call(node_agent.start, "trainer", argv, path, env, CHECKOUT), path))


def _wait(agents: Sequence[Agent], timeout_s: float) -> None:
    """Wait until all have ended well.

    Raises:
        NodeLost: if a node is lost. Ranks elsewhere fail first, since they miss those of that node: so each node is called before a failure
        counts as one of the program.
        TrainerLost, TrainerOutOfMemory, TrainingFailed: as infra/trainers/torchrun.py classifies the output of the one that failed.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        codes = _codes(agents)
        if all(code == 0 for code in codes):
            return
        if any(codes):
            for agent in agents:
                agent.node.call(node_agent.ping)
            raise _failure(agents)
        if time.monotonic() > deadline:
            raise TrainerLost(f"torchrun was ended after {timeout_s:g} s (trainer.timeout_s)")
        time.sleep(POLL_S)


def _codes(agents: Sequence[Agent]) -> list[int | None]:
    return [agent.node.call(node_agent.exit_code, agent.process.program) for agent in agents]


def _failure(agents: Sequence[Agent]) -> Exception:
    """Return what the output of the programs that failed says: a cause that can be cured counts more than that their connection broke."""
    settled = time.monotonic() + SETTLE_S
    while None in (codes := _codes(agents)) and time.monotonic() < settled:
        time.sleep(POLL_S)
    causes = []
    for agent, code in zip(agents, codes, strict=True):
        if code:
            end = logs.last_lines(agent.log_path)
            message = f"torchrun on node {agent.node.address} exited with {code}; the end of {agent.log_path}:\n{end}"
            causes.append(torchrun.classified(children.ProgramFailed(message, code), agent.log_path))
    return next((cause for cause in causes if not isinstance(cause, TrainingFailed)), causes[0])


def _end(agents: Sequence[Agent]) -> None:
    """End what still runs. A lost node's agent ends its own programs."""
    for agent in agents:
        try:
            agent.node.call(node_agent.stop, agent.process)
        except NodeLost as lost:
            log.info("torchrun on a lost node is left to its agent: %s", lost)
