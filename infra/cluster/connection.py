"""This process's connection to Ray, made when a run first needs a node. The only module that imports Ray.

flow --ray--> one agent a node --starts--> engine servers, torchrun's agents

A placement group reserves one bundle on each node: a CPU and all GPUs. Either all are reserved, or the run waits. Agents end with this process.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from infra.cluster import head, node_agent
from infra.cluster.node_agent import NodeAgent
from infra.cluster.nodes import HERE, ClusterNode, Node, Placement, Slot, check_even, lost
from infra.config import EngineConfig
from infra.failures import NodeLost
from infra.machine import devices
from infra.processes import child_environment
from infra.processes.children import PROGRAM, ProcessRef
from infra.settings import CHECKOUT, LOOPBACK, settings
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 600.0
"""Seconds to wait for nodes that other runs have reserved."""
LOOK_S = 15.0
CONNECT_TIMEOUT_S = 10.0
PING_S = 60.0
"""Seconds to wait for an agent's answer, and then for its answer to a ping. Without either its node counts as lost."""
AGENT_THREADS = 64
"""Calls that an agent answers at a time; waits for a release take one each."""
MISSING = "a cluster needs Ray, which is not installed: `python3 infra/setup/bootstrap.py --ray` or `pip install 'ratchet[ray]'` installs it"
_placing = threading.Lock()


def is_set() -> bool:
    """Whether this process uses a cluster."""
    return settings().cluster_address is not None


def place(replica: int, gpus: int) -> Slot:
    """Return where a replica of the engine runs: this machine without a cluster. A server that judges (-1) shares the place of the first.
    Raises NoNodeForEngine as Placement.of does."""
    return placement().of(max(replica, 0), gpus) if is_set() else Slot(HERE, max(replica, 0))


def node_of(key: str) -> Node:
    """Return the node with this key; a lost one if this process does not use it."""
    if not key:
        return HERE
    nodes = placement().nodes if is_set() else []
    return next((node for node in nodes if node.key == key), lost(key))


def num_replicas(config: EngineConfig) -> int:
    """Servers that the engine consists of: with engine.replicas auto as many as the living nodes have room for at the moment."""
    if not is_set() or config.replicas is not None:
        return devices.num_replicas(config)
    return placement().fitted(config.tensor_parallel)


def living() -> list[ClusterNode]:
    """Return the nodes in use that are not known to be lost; that of this process is the first."""
    return placement().living


def placement() -> Placement:
    with _placing:
        return _connected()


@cache
def _connected() -> Placement:
    ray = _ray()
    _join(ray)
    nodes = _agents(ray)
    log.info("cluster: %d nodes, %s", len(nodes), ", ".join(f"{node.address} ({node.num_gpus} GPUs)" for node in nodes))
    machine = settings()
    return Placement(nodes, nodes_per_replica=machine.cluster_engine_nodes, trusted_network=machine.cluster_trusted_network)


def check_installed() -> None:
    """Raises ValueError if Ray is not installed."""
    _ray()


def check_there() -> None:
    """Check that something listens at the address of the cluster, unless this process has joined it: Ray would try for minutes, and ends the process.

    Raises:
        ValueError: if nothing does.
    """
    address = settings().cluster_address
    if address in (None, "auto") or _connected.cache_info().currsize:
        return
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"RATCHET_CLUSTER_ADDRESS {address}: nothing answers there ({error.strerror or error}): start Ray's head (`ray start --head`), or give "
            "the address of one that runs"
        ) from error


def check_engine(config: EngineConfig) -> None:
    """Check what can be said of an engine's place without the cluster. Raises ValueError, as Placement and the launch would."""
    if num_nodes := settings().cluster_engine_nodes:
        check_even(config.tensor_parallel, num_nodes)
        if num_nodes > 1 and config.kind == "vllm":
            raise ValueError(
                f"engine.kind 'vllm' with RATCHET_CLUSTER_ENGINE_NODES {num_nodes}: only sglang can be over several nodes; take it, or unset that"
            )


def _ray() -> Any:
    if settings().cluster_address == "auto" and head.running():
        os.environ.update(head.environment())  # Ray reads its variables when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with _own_sigterm():
        try:
            import ray
            import ray.util.scheduling_strategies
        except ModuleNotFoundError as error:
            raise ValueError(MISSING) from error
    return ray


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM: an import of Ray and a start of its driver replace it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _join(ray: Any) -> None:
    """Connect to the cluster.

    Raises:
        ValueError: if there is none at the address, or its token is another one. Ray's message is left out: it has several paragraphs.
    """
    check_there()
    address = settings().cluster_address
    if address == "auto" and (own := head.running()):
        address = own.address
    host = (address or "").rpartition(":")[0].strip("[]")
    own_host = {"_node_ip_address": host} if host in (LOOPBACK, "::1") else {}
    try:
        with _own_sigterm():
            ray.init(address=address, namespace="ratchet", log_to_driver=False, logging_level=logging.ERROR, **own_host)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"RATCHET_CLUSTER_ADDRESS {settings().cluster_address}: this machine is no node of a Ray cluster there, or its token differs "
            f"(RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH): {first}. `ratchet up --cluster` starts one, `ray start --address` joins one"
        ) from error


def _agents(ray: Any) -> list[ClusterNode]:
    wanted = settings().cluster_nodes
    found = _usable([node for node in ray.nodes() if node["Alive"]])
    if wanted and wanted > len(found):
        raise ValueError(f"RATCHET_CLUSTER_NODES is {wanted}, the cluster has {len(found)} living nodes: add some, or lower it")
    gpus = sorted(map(_num_gpus, found), reverse=True)[: wanted or len(found)]
    group = ray.util.placement_group([_bundle(count) for count in gpus], strategy="STRICT_SPREAD")
    waited = 0.0
    while not group.wait(LOOK_S):
        waited += LOOK_S
        if waited >= PLACE_TIMEOUT_S:
            raise ValueError(
                f"the cluster's {len(gpus)} nodes were not free in {PLACE_TIMEOUT_S:g} s: each needs a CPU and all its GPUs unreserved "
                "(`ray status` shows who has them), or set RATCHET_CLUSTER_NODES lower"
            )
        log.warning("waiting for %d nodes of the cluster with all their GPUs: other work has them reserved", len(gpus))
    here = ray.get_runtime_context().get_node_id()
    nodes, locks = [], _lock_folders(found)
    for number, count in enumerate(gpus):
        node_id, address, handle = _start_agent(ray, group, number, count, locks)
        key = f"{address}#{node_id[:8]}{handle.id[:8]}"
        nodes.append((node_id != here, address, ClusterNode(key, address, count, handle)))
    nodes.sort(key=lambda each: each[:2])
    ours = frozenset((node_agent.own_ref(), *(node.call(node_agent.own_ref) for _, _, node in nodes)))
    for is_elsewhere, _, node in nodes:
        # With GPUs this process holds the lock of its own node already.
        if is_elsewhere or devices.device() == "cpu":
            node.take_lock(f"a run of {settings().workspace}", ours)
    return [node for _, _, node in nodes]


def _lock_folders(found: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
    """Return by Ray's id of a node the folder of its GPU lock, for those without a GPU. It is named by the node's address, which a node that
    comes back has again. Nodes at one address, as on loopback, are numbered."""
    own = settings().lock_folder
    root = own / "nodes" if own else Workspace.here().locks_of_nodes
    folders: dict[str, Path] = {}
    for node in sorted(found, key=lambda node: str(node["NodeID"])):
        folder = root / str(node["NodeManagerAddress"])
        number = sum(taken.name.partition("#")[0] == folder.name for taken in folders.values())
        folders[str(node["NodeID"])] = folder.with_name(f"{folder.name}#{number}") if number else folder
    return folders


def _usable(living: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the nodes that can be of use: all, or those with GPUs if there are any, since a head often has none.

    Raises:
        ValueError: if this process would plan for a CPU what others compute on GPUs.
    """
    with_gpus = [node for node in living if _num_gpus(node)]
    if with_gpus and devices.device() == "cpu":
        raise ValueError(
            f"this machine has no GPU, and node {with_gpus[0]['NodeManagerAddress']} of the cluster has {_num_gpus(with_gpus[0])}: "
            "give the command on a node with GPUs"
        )
    return with_gpus or list(living)


def _num_gpus(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _bundle(num_gpus: int) -> dict[str, float]:
    return {"CPU": 1, **({"GPU": num_gpus} if num_gpus else {})}


def _start_agent(ray: Any, group: Any, number: int, num_gpus: int, locks: Mapping[str, Path]) -> tuple[str, str, "_RayAgent"]:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=number
    )
    path = os.pathsep.join((str(CHECKOUT), *filter(None, (os.environ.get("PYTHONPATH"),))))
    environment = {"PYTHONPATH": path, **_settings_of_nodes()}
    remote = ray.remote(_Agent).options(
        num_cpus=1,
        num_gpus=num_gpus,
        max_concurrency=AGENT_THREADS,
        max_restarts=0,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": environment, "py_executable": sys.executable},
    )
    actor = remote.remote(locks)
    try:
        node_id, address = ray.get(actor.where.remote(), timeout=PLACE_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise ValueError(f"an agent could not start on a node of the cluster: {_first_line(error)}") from error
    return node_id, address, _RayAgent(ray, actor, address)


def _settings_of_nodes() -> dict[str, str]:
    """Return our settings for an agent: all but secrets and those of the cluster, and the switches of engine and trainer, which count as their
    versions. It works for the same workspace, on its own machine."""
    own = {name: value for name, value in child_environment.passed_on().items() if name.startswith("RATCHET_")}
    own = {name: value for name, value in own.items() if name != PROGRAM and not name.startswith("RATCHET_CLUSTER_")}
    return own | child_environment.switches() | {"RATCHET_WORKSPACE": str(settings().workspace)}


class _Agent(NodeAgent):
    """A NodeAgent as an actor."""

    def __init__(self, locks: Mapping[str, Path]) -> None:
        import ray

        self._where = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        super().__init__(locks[self._where[0]])

    def where(self) -> tuple[str, str]:
        """Id and address of its node, as Ray knows them."""
        return self._where


class _RayAgent:
    """An AgentHandle: an actor's handle, with Ray's errors translated."""

    def __init__(self, ray: Any, actor: Any, address: str) -> None:
        self.ray, self.actor, self.address = ray, actor, address
        self.id: str = actor._actor_id.hex()

    def take_lock(self, who: str, ours: frozenset[ProcessRef]) -> str:
        return str(self._result(self.actor.take_lock.remote(who, ours)))

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, BaseException | None]:
        result: tuple[Any, BaseException | None] = self._result(self.actor.call.remote(function, arguments, named))
        return result

    def _result(self, call: Any) -> Any:
        while True:
            try:
                return self.ray.get(call, timeout=PING_S)
            except self.ray.exceptions.GetTimeoutError:
                self._check_answers()  # Ray watches nodes and processes, not whether a process does anything
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self.ray.exceptions.RayError as error:
                raise NodeLost(f"node {self.address} is lost: {_first_line(error)}") from error

    def _check_answers(self) -> None:
        try:
            self.ray.get(self.actor.call.remote(node_agent.ping, (), {}), timeout=PING_S)
        except self.ray.exceptions.RayError as error:
            if isinstance(error, self.ray.exceptions.GetTimeoutError):
                raise NodeLost(f"node {self.address} is lost: its agent has not answered for {2 * PING_S:g} s") from error
            raise NodeLost(f"node {self.address} is lost: {_first_line(error)}") from error

    def end(self) -> None:
        try:
            self.ray.kill(self.actor, no_restart=True)
        except Exception as error:  # noqa: BLE001  # it is given up, and the cluster may be gone too
            log.info("the agent of node %s could not be ended: %s", self.address, _first_line(error))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
