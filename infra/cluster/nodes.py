"""The nodes that a run uses, as seen by the process that makes its steps. Without a cluster there is one: this machine.

A node is known by its key. That of this machine without an agent is empty; another names the agent, which is gone with its driver. So the key of
an earlier process's agent is that of a lost node.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from infra.failures import EngineUnavailable, NodeLost
from infra.processes.children import ProcessRef

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Node(Protocol):
    key: str
    address: str
    """IP address at which the other nodes reach it."""

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function of ours there. Raises what it raises, or NodeLost."""


class _ThisMachine:
    key, address = "", ""

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return function(*arguments, **named)


HERE: Node = _ThisMachine()


class _LostNode:
    """A node that is no longer used."""

    def __init__(self, key: str) -> None:
        self.key, self.address = key, key.partition("#")[0]

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        raise NodeLost(f"node {self.address} is gone, or belongs to a run that has ended")


class AgentHandle(Protocol):
    """An agent on a node: see infra/cluster/node_agent.py. Raises NodeLost."""

    def take_lock(self, who: str, ours: frozenset[ProcessRef]) -> str: ...

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, BaseException | None]: ...

    def end(self) -> None:
        """End the agent and with it its programs, as far as the node can be reached. Never raises."""


class ClusterNode:
    """A node with an agent. Once lost it stays lost: its agent is ended, so that nothing of it works on beside its successor."""

    def __init__(self, key: str, address: str, num_gpus: int, agent: AgentHandle) -> None:
        self.key, self.address, self.num_gpus, self.agent = key, address, num_gpus, agent
        self.is_lost = False

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self.is_lost:
            raise NodeLost(f"node {self.address} was lost")
        try:
            result, error = self.agent.call(function, arguments, named)
        except NodeLost as lost:
            self._lose(lost)
            raise
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _lose(self, lost: NodeLost) -> None:
        if not self.is_lost:
            self.is_lost = True
            log.warning("%s", lost)
            self.agent.end()

    def take_lock(self, who: str, ours: frozenset[ProcessRef]) -> None:
        """Wait for the node's GPU lock; logs who holds it. Raises ValueError if one of our own processes does."""
        said = ""
        while message := self.agent.take_lock(who, ours):
            if message != said:
                log.warning("waiting for node %s: %s", self.address, message)
                said = message


class Slot(NamedTuple):
    """The place of an engine server."""

    node: Node
    number: int
    """Number among the servers of that node: its GPUs begin at `number` times those of a server."""


class Placement:
    """Which replica is where. Replicas are spread: each node gets one before any gets another. Without GPUs a node takes any number."""

    def __init__(self, nodes: list[ClusterNode]) -> None:
        self.nodes = nodes
        self._slots: dict[int, tuple[ClusterNode, int]] = {}
        self._lock = threading.Lock()

    @property
    def living(self) -> list[ClusterNode]:
        return [node for node in self.nodes if not node.is_lost]

    def room(self, gpus: int) -> int | None:
        """Return how many servers of that many GPUs the living nodes take; None for any number."""
        rooms = [node.num_gpus // gpus for node in self.living if node.num_gpus]
        return sum(rooms) if rooms else None

    def of(self, replica: int, gpus: int) -> Slot:
        """Return the place of a replica. It keeps its place until its node is lost.

        gpus: GPUs of each server.

        Raises:
            EngineUnavailable: if no living node has room for it.
        """
        with self._lock:
            found = self._slots.get(replica)
            if found is None or found[0].is_lost:
                self._slots[replica] = found = self._free(replica, gpus)
            return Slot(*found)

    def _free(self, replica: int, gpus: int) -> tuple[ClusterNode, int]:
        taken = [slot for number, slot in self._slots.items() if number != replica]
        free = []
        for position, node in enumerate(self.living):
            numbers = {number for at, number in taken if at is node}
            number = next(number for number in range(len(numbers) + 1) if number not in numbers)
            if not node.num_gpus or (number + 1) * gpus <= node.num_gpus:
                free.append((number, position, node))
        if not free:
            there = ", ".join(f"{node.address} ({node.num_gpus} GPUs)" for node in self.living) or "none"
            raise EngineUnavailable(
                f"replica {replica} of the engine has no node: {gpus} free GPUs are needed on one, living nodes are {there}. "
                "Add a node, or set engine.replicas to auto"
            )
        number, _, node = min(free, key=lambda each: each[:2])
        return node, number


def lost(key: str) -> Node:
    return _LostNode(key)
