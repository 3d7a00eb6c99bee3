"""The nodes that a run uses, as seen by the process that makes its steps. Without a cluster there is one: this machine.

A node is known by its key. That of this machine without an agent is empty; another names the agent, which is gone with its driver. So the key of
an earlier process's agent is that of a lost node.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from infra.cluster import node_agent
from infra.config.sections.engine import MAX_REPLICAS
from infra.failures import EngineUnavailable, NodeLost, NoNodeForEngine
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
    """Number among the servers of that node: its GPUs begin at `number` times those that a server has there."""
    others: tuple["Slot", ...] = ()
    """Of a server that is spread over several nodes: the places of its other parts."""

    @property
    def parts(self) -> "tuple[Slot, ...]":
        """The places of all its parts, in the order of their ranks; of a server on one node this one."""
        return self, *self.others


class Placement:
    """Which replica is where. Replicas are spread: each node gets one before any gets another. Without GPUs a node takes any number.

    A replica is on one node, if any node could have it, or if only nodes without GPUs live. Otherwise it is on as few as share its GPUs evenly.
    """

    def __init__(
        self, nodes: list[ClusterNode], *, nodes_per_replica: int | None = None, trusted_network: str | None = None
    ) -> None:
        """nodes_per_replica: None: as few as have room. trusted_network: Without it no replica is spread over several nodes."""
        self.nodes, self.nodes_per_replica = nodes, nodes_per_replica
        self.trusted = ip_network(trusted_network) if trusted_network else None
        self.is_fitted = False
        """Whether the engine has as many replicas as fit: after a loss it may have fewer."""
        self._slots: dict[int, list[tuple[ClusterNode, int]]] = {}
        self._lock = threading.Lock()

    @property
    def living(self) -> list[ClusterNode]:
        return [node for node in self.nodes if not node.is_lost]

    @property
    def _has_gpus(self) -> bool:
        return any(node.num_gpus for node in self.nodes)

    def fitted(self, gpus: int) -> int:
        """Return the number of replicas with engine.replicas auto, 1 to MAX_REPLICAS: as many as the living nodes have room for, or one on each
        node without GPUs. Those above it give their places back. Nodes are asked first, as one may have died unseen. Raises ValueError as `of` does.
        """
        for node in self.living:
            with suppress(NodeLost):
                node.call(node_agent.ping)
        room = self.room(gpus)
        count = min(MAX_REPLICAS, max(1, len(self.living) // self.spread(gpus) if room is None else room))
        with self._lock:
            self.is_fitted = True
            self._slots = {replica: parts for replica, parts in self._slots.items() if replica < count}
            for replica in range(count):  # in this order: the first ones stay longest, and are on the node of this process
                with suppress(EngineUnavailable):
                    self._placed(replica, gpus)
        return count

    def room(self, gpus: int) -> int | None:
        """Return how many servers of that many GPUs the living nodes take; None for any number. Raises ValueError as `of` does."""
        trial = Placement([node for node in self.living if node.num_gpus], nodes_per_replica=self.nodes_per_replica)
        if not trial.nodes:
            return None
        for count in range(sum(node.num_gpus for node in trial.nodes) // gpus):
            try:
                trial._slots[count] = trial._free(count, gpus)
            except NoNodeForEngine:
                return count
        return len(trial._slots)

    def spread(self, gpus: int) -> int:
        """Return over how many nodes a server of that many GPUs is spread; 1 too if it fits nowhere.

        Raises:
            ValueError: if the nodes that were set do not share the GPUs evenly.
        """
        if self.nodes_per_replica is not None:
            check_even(gpus, self.nodes_per_replica)
            return self.nodes_per_replica
        even = [count for count in range(1, len(self.living) + 1) if gpus % count == 0]
        roomy = {count: [node for node in self.living if not node.num_gpus or node.num_gpus >= gpus // count] for count in even}
        return next((count for count in even if len(roomy[count]) >= count), 1)

    def of(self, replica: int, gpus: int) -> Slot:
        """Return the place of a replica. It keeps its place until its node is lost.

        gpus: GPUs of each server.

        Raises:
            NoNodeForEngine: if the living nodes have no room for it. NodeLost: the same where the next attempt has fewer replicas.
            ValueError: if it would be over several nodes, and these are not in a trusted network.
        """
        with self._lock:
            first, *others = (Slot(*part) for part in self._placed(replica, gpus))
            return first._replace(others=tuple(others))

    def _placed(self, replica: int, gpus: int) -> list[tuple[ClusterNode, int]]:
        found = self._slots.get(replica)
        if found is None or any(node.is_lost for node, _ in found):
            found = self._free(replica, gpus)
            self._check_trusted(gpus, [node for node, _ in found])
            self._slots[replica] = found
        return found

    def _free(self, replica: int, gpus: int) -> list[tuple[ClusterNode, int]]:
        taken = [part for number, parts in self._slots.items() if number != replica for part in parts]
        count, free = self.spread(gpus), []
        for position, node in enumerate(self.living):
            numbers = {number for at, number in taken if at is node}
            number = next(number for number in range(len(numbers) + 1) if number not in numbers)
            if not node.num_gpus or (number + 1) * gpus // count <= node.num_gpus:
                free.append((number, position, node))
        if len(free) < count:
            there = ", ".join(f"{node.address} ({node.num_gpus} GPUs)" for node in self.living) or "none"
            where = "one" if count == 1 else f"each of {count}"
            needed = f"{gpus // count} free GPUs are needed on {where}" if self._has_gpus else f"{count} nodes are needed"
            if replica and self.is_fitted:
                raise NodeLost(f"replica {replica} of the engine has no node any more: {needed}, living nodes are {there}")
            otherwise = "set engine.replicas to auto" if replica else "lower engine.tensor_parallel"
            otherwise = "lower RATCHET_CLUSTER_ENGINE_NODES" if count == self.nodes_per_replica else otherwise
            raise NoNodeForEngine(
                f"replica {replica} of the engine has no node: {needed}, living nodes are {there}. Give the same command again when there are "
                f"more, or {otherwise}"
            )
        chosen = sorted(free, key=lambda each: each[:2])[:count]
        return [(node, number) for number, _, node in sorted(chosen, key=lambda each: each[1])]

    def _check_trusted(self, gpus: int, nodes: list[ClusterNode]) -> None:
        if len(nodes) == 1:
            return
        if self.trusted is None:
            raise ValueError(
                f"engine.tensor_parallel {gpus} is spread over {len(nodes)} nodes, where SGLang sends pickles over TCP without a password: "
                "a program that reaches those ports can run code on the nodes. Name the network that only the nodes reach, such as "
                "RATCHET_CLUSTER_TRUSTED_NETWORK=10.0.0.0/24, or lower engine.tensor_parallel to the GPUs of one node"
            )
        for node in nodes:
            if ip_address(node.address) not in self.trusted:
                raise ValueError(
                    f"node {node.address} is outside RATCHET_CLUSTER_TRUSTED_NETWORK {self.trusted}, which carries the engine over "
                    f"{len(nodes)} nodes: start its Ray with --node-ip-address in that network, or name the network of all nodes"
                )


def check_even(gpus: int, num_nodes: int) -> None:
    """Raises ValueError if a replica's GPUs cannot be shared evenly by the nodes that were set for it."""
    if gpus % num_nodes:
        raise ValueError(
            f"engine.tensor_parallel {gpus} with RATCHET_CLUSTER_ENGINE_NODES {num_nodes}: each node has to get as many GPUs of a replica as the "
            "others, set engine.tensor_parallel to a multiple of that"
        )


def lost(key: str) -> Node:
    return _LostNode(key)
