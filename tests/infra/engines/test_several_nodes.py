"""One server over several nodes: its programs, and what is done when a part is gone. Agents are calls in this process, programs are `sleep`.

Real: infra/engines/replicas/test_on_cluster.py, and with SGLang tests/benches/cluster.sh.
"""

import contextvars
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import connection, node_agent
from infra.cluster.nodes import ClusterNode, Placement
from infra.config import EngineConfig
from infra.engines.server import parts, server_process
from infra.engines.server.parts import Launch, ServerPart
from infra.engines.server.server_process import ServerState
from infra.engines.sglang import several_nodes
from infra.engines.sglang.engine import SGLangEngine
from infra.engines.vllm import engine as vllm
from infra.failures import EngineUnavailable, NodeLost
from infra.machine import devices
from infra.processes.children import ProcessRef
from infra.records import BaseModelRef
from infra.settings import settings

SLEEP = ["sleep", "600"]


class AgentHere:
    """Calls functions here until it is lost."""

    is_lost = False

    def take_lock(self, who: str, ours: frozenset[ProcessRef]) -> str:
        return ""

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if self.is_lost:
            raise NodeLost("node fd00::2 is lost: The actor died")
        return node_agent.NodeAgent.call(None, function, arguments, named)  # type: ignore[arg-type]

    def end(self) -> None:
        pass


@pytest.fixture
def nodes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> list[ClusterNode]:
    """Two nodes without GPUs, over which each replica is spread."""
    found = [ClusterNode(f"fd00::{number}#a", f"fd00::{number}", 0, AgentHere()) for number in (1, 2)]
    placement = Placement(found, nodes_per_replica=2, trusted_network="fd00::/64")
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "[fd00::1]:6379")
    settings.cache_clear()
    monkeypatch.setattr(connection, "placement", lambda: placement)
    monkeypatch.setattr(node_agent, "interface_of", {"fd00::1": "eth0", "fd00::2": "eth1"}.get)
    return found


@pytest.fixture
def engine(nodes: list[ClusterNode], random_tiny: Path) -> SGLangEngine:
    config = EngineConfig(tensor_parallel=2, kv_cache_tokens=4096)
    return SGLangEngine(config, BaseModelRef(id=str(random_tiny), sha256="0"), ("q_proj",))


def value(argv: Any, flag: str) -> str:
    return str(argv[argv.index(flag) + 1])


def test_each_node_gets_sglang_s_flags_for_its_rank_and_sockets_on_its_own_interface(engine: SGLangEngine) -> None:
    first, second = engine._spread(*engine._command(30000), 30000)
    assert [value(each.argv, "--node-rank") for each in (first, second)] == ["0", "1"]
    for each in (first, second):
        assert (value(each.argv, "--nnodes"), value(each.argv, "--tp-size")) == ("2", "2")
        assert value(each.argv, "--dist-init-addr") == "[fd00::1]:30001", "an IPv6 address stands in brackets"
        assert value(each.argv, "--random-seed") == value(first.argv, "--random-seed")
        assert each.env["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "false"
        assert each.env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{settings().workspace}/engine-meeting/ranks"
    assert (value(first.argv, "--host"), value(second.argv, "--host")) == ("fd00::1", "::1"), "only the first answers"
    assert value(first.argv, "--port") == "30000" != value(second.argv, "--port"), "nodes may share an address, as on loopback"
    assert (first.argv.count("--host"), second.argv.count("--host"), second.argv.count("--port")) == (1, 1, 1)
    names = [
        (each.env["GLOO_SOCKET_IFNAME"], each.env["NCCL_SOCKET_IFNAME"], each.env["SGLANG_HOST_IP"]) for each in (first, second)
    ]
    assert names == [("eth0", "eth0", "fd00::1"), ("eth1", "eth1", "fd00::2")]


def test_each_node_shows_its_part_the_gpus_that_it_has_there(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "engine_gpus", lambda count, number: [7 - number] * count)
    programs = several_nodes.programs(*engine._command(30000), engine.place, 30000)
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in programs] == ["7", "7"], "one of the two on each"


def test_a_node_whose_interface_is_unknown_is_refused(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "interface_of", lambda address: None)
    with pytest.raises(ValueError, match=r"^node fd00::1: no network interface of it has this address"):
        engine._spread(*engine._command(30000), 30000)


def test_another_kind_of_engine_is_refused_by_name(
    nodes: list[ClusterNode], random_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "check_config", lambda *_: None)
    config = EngineConfig(kind="vllm", tensor_parallel=16)
    other = vllm.VLLMEngine(config, BaseModelRef(id=str(random_tiny), sha256="0"), ("q_proj",))
    with pytest.raises(
        ValueError, match=r"^engine.kind vllm with engine.tensor_parallel 16 would be over 2 nodes, which only sglang"
    ):
        other._spread([], {}, 30000)


@pytest.fixture
def state(nodes: list[ClusterNode], monkeypatch: pytest.MonkeyPatch) -> ServerState:
    """A server of two programs that do nothing, taken for ready."""
    monkeypatch.setattr(server_process, "is_ready", lambda *_: True)
    monkeypatch.setattr(server_process.gpu_programs, "record_shared_memory", lambda ref: None)
    programs = [Launch(node, SLEEP, {}) for node in nodes]
    return server_process.launch("sglang", programs, identity="i", ready_path="/health", timeout_s=20, port=30000)


def kill(part: ServerPart) -> None:
    os.kill(part.process.pid, 9)
    deadline = time.monotonic() + 10
    while part.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_server_is_recorded_with_its_parts_and_lives_while_all_of_them_do(state: ServerState, nodes: list[ClusterNode]) -> None:
    assert server_process.recorded() == state
    assert [part.node for part in state.parts] == [node.key for node in nodes]
    assert [part.log_path.name for part in state.parts] == ["sglang-0001.log", "sglang-0001-1.log"]
    assert server_process.is_alive(state)
    kill(state.parts[1])
    assert not server_process.is_alive(state) and state.parts[0].is_alive()
    server_process.stop_replica(0)
    assert not state.parts[0].is_alive(), "the part that is left is ended too"


def test_what_each_part_released_is_recorded_by_node(state: ServerState) -> None:
    server_process.remember(state.with_released([{0: 5}, {0: 7, 1: 8}]))
    found = server_process.recorded()
    assert found and [part.released for part in found.parts] == [{0: 5}, {0: 7, 1: 8}]
    server_process.stop_replica(0)


def test_the_loss_of_a_part_ends_the_server_and_is_the_error_of_the_rollout(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LOOK_S", 0.05)
    first, second = state.parts
    with (
        pytest.raises(EngineUnavailable, match=r"^part 1 of the engine, on node fd00::2, is gone; the end of .*-1\.log"),
        parts.watched(state.parts, lambda: server_process.stop_replica(0)),
    ):
        kill(second)
        deadline = time.monotonic() + 20
        while first.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not first.is_alive(), "the first part would wait for the other"
        raise EngineUnavailable("connection refused")


def test_the_parts_are_looked_at_in_the_context_of_the_rollout(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LOOK_S", 0.05)
    of_rollout, found = contextvars.ContextVar("of_rollout", default="none"), list[str]()
    of_rollout.set("this")
    kill(state.parts[1])
    with pytest.raises(EngineUnavailable), parts.watched(state.parts, lambda: found.append(of_rollout.get())):
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            time.sleep(0.02)
        raise EngineUnavailable("connection refused")
    assert found == ["this"], "its log lines belong to the flow run"
    server_process.stop_replica(0)


def test_a_part_that_ended_because_it_missed_the_first_is_not_blamed(state: ServerState) -> None:
    kill(state.parts[1])
    state.parts[1].log_path.write_text(
        "Traceback (most recent call last):\n  File x\nRuntimeError: [gloo] Connection closed by peer\n"
    )
    with pytest.raises(EngineUnavailable, match=r"^HTTP 500$"), parts.watched(state.parts, lambda: None):
        raise EngineUnavailable("HTTP 500")
    server_process.stop_replica(0)


def test_a_part_on_a_lost_node_is_a_lost_node_and_what_is_left_is_ended(state: ServerState, nodes: list[ClusterNode]) -> None:
    def lose() -> None:
        nodes[1].agent.is_lost = True  # type: ignore[attr-defined]
        raise EngineUnavailable("connection refused")

    with pytest.raises(NodeLost, match=r"^node fd00::2 (is|was) lost"), parts.watched(state.parts, lambda: None):
        lose()
    assert not server_process.is_alive(state)
    server_process.stop_replica(0)
    assert not state.parts[0].is_alive()
    node_agent.stop(state.parts[1].process)


def test_an_error_of_a_part_that_misses_another_one_is_no_crash_of_its_own(tmp_path: Path) -> None:
    ref = node_agent.own_ref()
    paths = [tmp_path / "sglang-0001.log", tmp_path / "sglang-0001-1.log"]
    paths[0].write_text("Traceback (most recent call last):\n  File x\nRuntimeError: [gloo] Connection closed by peer\n")
    paths[1].write_text("killed\n")
    both = [ServerPart(process=ref, log_path=path) for path in paths]
    assert parts.last_traceback(both) == ""
    assert "closed by peer" in parts.last_traceback(both[:1]), "of a server on one node it is its own"
    paths[1].write_text("Traceback (most recent call last):\n  File y\nKeyError: 'x'\n")
    assert "KeyError" in parts.last_traceback(both)
