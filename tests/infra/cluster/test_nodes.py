"""Nodes of a cluster with agents that are calls in this process; only their loss is played. Real: infra/engines/replicas/test_on_cluster.py."""

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from infra.cluster import connection, node_agent, nodes
from infra.cluster.nodes import ClusterNode, Placement
from infra.config import EngineConfig, TrainerConfig
from infra.failures import (
    EngineUnavailable,
    NodeLost,
    NoNodeForEngine,
    NoNodesForRanks,
    TrainerLost,
    TrainerNodeLost,
    TrainingFailed,
    classify,
)
from infra.machine import ports
from infra.megatron.protocol.job import TrainJob
from infra.processes import gpu_lock
from infra.processes.children import ProcessRef
from infra.settings import CHECKOUT, settings
from infra.trainers import cluster
from infra.trainers.cluster import Agent


class AgentThatMayBeLost:
    """Calls functions here until it is lost."""

    def __init__(self) -> None:
        self.is_lost = self.was_ended = False
        self.num_calls = 0
        self.waits = ["its GPUs are held by another run", "its GPUs are held by another run", ""]

    def take_lock(self, who: str, ours: frozenset[ProcessRef]) -> str:
        return self.waits.pop(0)

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, BaseException | None]:
        self.num_calls += 1
        if self.is_lost:
            raise NodeLost("node 10.0.0.2 is lost: The actor died unexpectedly before finishing this task.")
        return node_agent.NodeAgent.call(None, function, arguments, named)  # type: ignore[arg-type]

    def end(self) -> None:
        self.was_ended = True


def node(number: int, num_gpus: int = 0) -> ClusterNode:
    return ClusterNode(f"10.0.0.{number}#a", f"10.0.0.{number}", num_gpus, AgentThatMayBeLost())


def agent(of: ClusterNode) -> AgentThatMayBeLost:
    assert isinstance(of.agent, AgentThatMayBeLost)
    return of.agent


def lose(lost: ClusterNode) -> None:
    agent(lost).is_lost = True
    with pytest.raises(NodeLost, match="is lost: The actor died"):
        lost.call(node_agent.ping)


def fail(message: str) -> None:
    raise ValueError(message)


def test_a_call_returns_what_the_function_returns_and_raises_what_it_raises() -> None:
    there = node(1)
    assert there.call(max, 3, 7) == 7  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^bad port$"):
        there.call(fail, "bad port")
    assert not there.is_lost


def test_a_lost_node_stays_lost_and_its_agent_is_ended_so_that_nothing_works_on_beside_its_successor() -> None:
    gone = node(2)
    lose(gone)
    assert gone.is_lost and agent(gone).was_ended
    agent(gone).is_lost = False  # the network is back
    with pytest.raises(NodeLost, match=r"node 10\.0\.0\.2 was lost"):
        gone.call(node_agent.ping)
    assert agent(gone).num_calls == 1


def test_the_loss_of_a_node_is_a_class_of_failure_for_engine_and_trainer() -> None:
    assert classify(NodeLost("x")).name == classify(TrainerNodeLost("x")).name == "node lost"
    assert classify(NodeLost("x")).num_attempts > 1


def test_an_engine_without_a_node_is_no_engine_that_may_be_started_again() -> None:
    first, second = node(1), node(2)
    placement = Placement([first, second], nodes_per_replica=2, trusted_network="10.0.0.0/24")
    placement.of(0, 2)
    lose(second)
    with pytest.raises(EngineUnavailable) as raised:  # a rollout by several replicas goes on without the one
        placement.of(0, 2)
    assert str(raised.value) == (
        "replica 0 of the engine has no node: 2 nodes are needed, living nodes are 10.0.0.1 (0 GPUs). Give the same command again when there "
        "are more, or lower RATCHET_CLUSTER_ENGINE_NODES"
    )
    assert classify(raised.value).name == "no node for the engine" and classify(raised.value).num_attempts == 1


def test_replicas_are_spread_over_nodes_and_keep_their_places() -> None:
    first, second = node(1, 4), node(2, 4)
    placement = Placement([first, second])
    assert [placement.of(replica, 2)[:2] for replica in range(4)] == [(first, 0), (second, 0), (first, 1), (second, 1)]
    assert placement.of(1, 2)[:2] == (second, 0)
    assert placement.room(2) == 4
    with pytest.raises(EngineUnavailable, match=r"replica 4 of the engine has no node: 2 free GPUs .* 10\.0\.0\.1 \(4 GPUs\)"):
        placement.of(4, 2)


def test_a_replica_of_a_lost_node_moves_and_the_others_stay() -> None:
    first, second, third = node(1), node(2), node(3)
    placement = Placement([first, second, third])
    assert [placement.of(replica, 1).node for replica in range(3)] == [first, second, third]
    lose(second)
    assert placement.of(1, 1)[:2] == (first, 1)
    assert [placement.of(replica, 1)[:2] for replica in (0, 2)] == [(first, 0), (third, 0)]
    assert placement.room(1) is None, "a node without GPUs takes any number"


def test_a_replica_of_a_lost_node_is_refused_where_no_gpu_is_left() -> None:
    first, second = node(1, 2), node(2, 2)
    placement = Placement([first, second])
    places = [placement.of(replica, 2) for replica in range(2)]
    lose(second)
    assert placement.of(0, 2) == places[0] and placement.room(2) == 1
    with pytest.raises(
        EngineUnavailable, match=r"replica 1 of the engine has no node.*when there are more, or set engine.replicas to auto"
    ):
        placement.of(1, 2)


def test_as_many_replicas_as_fit_become_fewer_and_those_that_are_left_take_the_places_of_the_others() -> None:
    first, second = node(1, 4), node(2, 4)
    placement = Placement([first, second])
    assert placement.fitted(2) == 4
    assert placement.of(3, 2)[:2] == (second, 1), "places are given in order, however replicas are started"
    places = [placement.of(replica, 2) for replica in range(4)]
    agent(second).is_lost = True  # not noticed yet
    assert placement.fitted(2) == 2 and second.is_lost
    assert placement.of(0, 2) == places[0]
    assert placement.of(1, 2)[:2] == (first, 1), "the place of replica 2, which there is no more"
    assert placement.fitted(8) == 1, "one that fits nowhere says so when it is placed"


def test_a_replica_of_as_many_as_fit_without_a_node_is_a_lost_node_and_the_next_attempt_has_fewer() -> None:
    first, second = node(1, 2), node(2, 2)
    placement = Placement([first, second])
    assert placement.fitted(2) == 2
    placement.of(0, 2)
    lose(second)
    with pytest.raises(NodeLost, match=r"^replica 1 of the engine has no node any more: 2 free GPUs are needed on one") as raised:
        placement.of(1, 2)
    assert classify(raised.value).num_attempts > 1
    assert placement.fitted(2) == 1
    lose(first)
    with pytest.raises(NoNodeForEngine, match=r"^replica 0 of the engine has no node"):
        placement.of(0, 2)


def test_without_gpus_as_many_replicas_as_nodes_fit_and_at_most_so_many_as_there_may_be() -> None:
    found = [node(number) for number in range(70)]
    assert Placement(found[:3]).fitted(1) == 3
    assert Placement(found[:5], nodes_per_replica=2, trusted_network="10.0.0.0/24").fitted(2) == 2
    assert Placement(found).fitted(1) == EngineConfig(replicas=64).replicas


def spread_over(placement: Placement, replica: int, gpus: int) -> list[tuple[str, int]]:
    return [(part.node.address, part.number) for part in placement.of(replica, gpus).parts]


def test_a_replica_that_fits_on_no_node_is_on_as_few_as_share_its_gpus_evenly() -> None:
    living = [node(number, count) for number, count in enumerate([8, 8, 4, 8, 8], start=1)]
    placement = Placement(living, trusted_network="10.0.0.0/24")
    assert [placement.spread(gpus) for gpus in (4, 8, 16, 20, 32, 12)] == [1, 1, 2, 4, 4, 2]
    assert [spread_over(placement, replica, 16) for replica in range(2)] == [
        [("10.0.0.1", 0), ("10.0.0.2", 0)],
        [("10.0.0.4", 0), ("10.0.0.5", 0)],
    ]
    assert placement.room(16) == 2 and placement.room(8) == 4
    with pytest.raises(
        EngineUnavailable, match=r"replica 2 of the engine has no node: 8 free GPUs are needed on each of 2, living"
    ):
        placement.of(2, 16)


def test_a_set_number_of_nodes_is_used_although_one_would_do() -> None:
    placement = Placement([node(1, 4), node(2, 4)], nodes_per_replica=2, trusted_network="10.0.0.0/24")
    assert [spread_over(placement, replica, 2) for replica in range(2)] == [
        [("10.0.0.1", 0), ("10.0.0.2", 0)],
        [("10.0.0.1", 1), ("10.0.0.2", 1)],
    ]
    assert placement.room(2) == 4
    with pytest.raises(
        ValueError, match=r"^engine.tensor_parallel 3 with RATCHET_CLUSTER_ENGINE_NODES 2: each node has to get as many"
    ):
        placement.of(2, 3)
    without_gpus = Placement([node(1), node(2)], nodes_per_replica=2, trusted_network="10.0.0.0/24")
    assert len(without_gpus.of(0, 2).parts) == 2 and without_gpus.room(2) is None


def test_a_replica_over_several_nodes_moves_when_one_of_them_is_lost() -> None:
    living = [node(number, 8) for number in range(1, 4)]
    placement = Placement(living, trusted_network="10.0.0.0/24")
    assert spread_over(placement, 0, 16) == [("10.0.0.1", 0), ("10.0.0.2", 0)]
    lose(living[1])
    assert spread_over(placement, 0, 16) == [("10.0.0.1", 0), ("10.0.0.3", 0)]
    lose(living[2])
    with pytest.raises(
        EngineUnavailable, match=r"16 free GPUs are needed on one, living nodes are 10\.0\.0\.1 \(8 GPUs\)\. Give"
    ):
        placement.of(0, 16)


def test_a_replica_over_several_nodes_is_refused_without_a_network_that_is_trusted_with_it() -> None:
    with pytest.raises(
        ValueError, match=r"^engine.tensor_parallel 16 is spread over 2 nodes, where SGLang sends pickles .* such as RATCH"
    ):
        Placement([node(1, 8), node(2, 8)]).of(0, 16)
    assert Placement([node(1, 8), node(2, 8)]).of(0, 8).others == (), "one on one node needs none"


@pytest.mark.parametrize(
    ("addresses", "network"), [(("10.0.0.1", "10.0.1.2"), "10.0.0.0/24"), (("fd00::1", "fd01::2"), "fd00::/64")]
)
def test_a_node_outside_the_trusted_network_is_named(addresses: tuple[str, str], network: str) -> None:
    def cluster_of(*where: str) -> list[ClusterNode]:
        return [ClusterNode(f"{address}#a", address, 8, AgentThatMayBeLost()) for address in where]

    with pytest.raises(
        ValueError, match=rf"^node {addresses[1]} is outside RATCHET_CLUSTER_TRUSTED_NETWORK {network}, which carries"
    ):
        Placement(cluster_of(*addresses), trusted_network=network).of(0, 16)
    assert len(Placement(cluster_of(addresses[0], addresses[0]), trusted_network=network).of(0, 16).parts) == 2


def test_a_server_of_an_earlier_process_s_agent_is_on_a_lost_node() -> None:
    assert connection.node_of("") is nodes.HERE
    with pytest.raises(NodeLost, match=r"node 10\.0\.0\.9 is gone, or belongs to a run that has ended"):
        connection.node_of("10.0.0.9#old").call(node_agent.ping)


def test_a_wait_for_a_node_s_gpus_names_who_has_them_once(caplog: pytest.LogCaptureFixture) -> None:
    node(1).take_lock("a run", frozenset())
    assert caplog.messages == ["waiting for node 10.0.0.1: its GPUs are held by another run"]


def test_a_node_that_would_wait_for_the_lock_of_its_own_run_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_LOCK_FOLDER", str(workspace / "locks"))
    monkeypatch.setattr(node_agent, "LOCK_WAIT_S", 0.3)
    monkeypatch.setattr(node_agent.devices, "device", lambda: "cuda")  # with GPUs all nodes of a machine share its lock
    monkeypatch.setattr(node_agent, "_end_with", lambda raylet: None)
    settings.cache_clear()
    ours = frozenset((node_agent.own_ref(),))
    with gpu_lock.gpu_lock("run r"):
        second = node_agent.NodeAgent(workspace / "nodes/10.0.0.2")
        assert "run r of workspace" in second.take_lock("a run", frozenset()), "it waits for other runs"
        with pytest.raises(ValueError, match=r"^two nodes of the cluster share the GPU lock in .*/locks, held by run r of work"):
            second.take_lock("a run", ours)


def test_nodes_without_gpus_have_lock_folders_by_address_and_by_number_where_they_share_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"NodeID": name, "NodeManagerAddress": address} for name, address in (("c", "::1"), ("b", "::1"), ("a", "10.0.0.1"))]
    assert {name: folder.name for name, folder in connection._lock_folders(found).items()} == {
        "a": "10.0.0.1",
        "b": "::1",
        "c": "::1#1",
    }
    monkeypatch.setenv("RATCHET_LOCK_FOLDER", str(workspace / "elsewhere"))
    settings.cache_clear()
    assert connection._lock_folders(found)["a"] == workspace / "elsewhere/nodes/10.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_cluster_that_is_not_there_is_one_line_at_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port(16379, host.strip("[]"))
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", f"{host}:{port}")
    settings.cache_clear()
    with pytest.raises(
        ValueError, match=rf"^RATCHET_CLUSTER_ADDRESS {re.escape(host)}:{port}: nothing answers there \(.*\): start"
    ):
        connection.check_there()
    with pytest.raises(ValueError, match="nothing answers there"):
        connection._join(None)
    with socket.create_server((host.strip("[]"), port), family=socket.AF_INET6 if "[" in host else socket.AF_INET):
        connection.check_there()
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", "auto")
    settings.cache_clear()
    connection.check_there()


def test_a_head_without_gpus_is_left_out_and_gives_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    head, worker = (
        {"NodeManagerAddress": f"10.0.0.{n}", "Resources": {"CPU": 4, **gpus}} for n, gpus in ((1, {}), (2, {"GPU": 8.0}))
    )
    assert connection._usable([head, head]) == [head, head]
    with pytest.raises(
        ValueError, match=r"^this machine has no GPU, and node 10\.0\.0\.2 of the cluster has 8: give the command on"
    ):
        connection._usable([head, worker])
    monkeypatch.setattr(connection.devices, "device", lambda: "cuda")
    assert connection._usable([head, worker]) == [worker]


@pytest.mark.parametrize(
    ("num_processes", "gpus", "expected"),
    [(2, [0, 0], 2), (3, [0, 0], 1), (4, [0, 0, 0], 2), (8, [8, 8], 2), (8, [8], 1), (8, [4, 8], 2), (1, [0, 0], 1)],
)
def test_ranks_are_spread_evenly_over_as_many_nodes_as_have_a_gpu_for_each(
    num_processes: int, gpus: list[int], expected: int
) -> None:
    living = [node(number, count) for number, count in enumerate(gpus, start=1)]
    assert cluster.layout(num_processes, living) == living[:expected]


@pytest.mark.parametrize(("num_processes", "gpus"), [(16, [8]), (3, [2, 2])])
def test_a_trainer_that_does_not_fit_on_the_living_nodes_is_one_line(num_processes: int, gpus: list[int]) -> None:
    living = [node(number, count) for number, count in enumerate(gpus, start=1)]
    with pytest.raises(
        NoNodesForRanks, match=rf"^trainer.num_processes {num_processes} does not fit .* 10\.0\.0\.1 \({gpus[0]} GPUs\)"
    ):
        cluster.layout(num_processes, living)


def test_a_training_without_any_node_says_that_all_are_lost() -> None:
    with pytest.raises(NoNodesForRanks, match=r"^all nodes that this run used are lost: give the same command again"):
        cluster.layout(2, [])


def agents_with(codes: list[int | None], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """Agents of torchrun whose exit codes are these, and whose output reports an error of Gloo."""
    made = []
    for number, code in enumerate(codes, start=1):
        log_path = tmp_path / f"trainer-{number}.log"
        log_path.write_text("RuntimeError: [gloo] Connection closed by peer\n")
        program = f"program-{number}"
        monkeypatch.setitem(node_agent._exit_codes, program, [] if code is None else [code])
        made.append(Agent(node(number), ProcessRef(pid=1, started_ticks=1, boot="b", program=program), log_path))
    return made


def test_ranks_that_miss_those_of_a_lost_node_are_no_failed_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = agents_with([1, None], tmp_path, monkeypatch)
    real = node_agent.exit_code

    def then_lost(program: str) -> int | None:
        agent(agents[1].node).is_lost = program == "program-2"  # the failure is seen first, then the loss
        return real(program)

    monkeypatch.setattr(node_agent, "exit_code", then_lost)
    with pytest.raises(NodeLost):
        cluster._wait(agents, timeout_s=5)


def test_a_training_that_failed_on_living_nodes_is_not_tried_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SETTLE_S", 0)
    with pytest.raises(TrainingFailed, match=r"(?s)torchrun on node 10\.0\.0\.1 exited with 1.*Connection closed by peer"):
        cluster._wait(agents_with([1, None], tmp_path, monkeypatch), timeout_s=5)


def test_a_killed_rank_counts_more_than_the_connections_that_it_broke(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = agents_with([1, 1], tmp_path, monkeypatch)
    agents[1].log_path.write_text("exitcode: -9 Signal 9 (SIGKILL) received by PID 7\n")
    with pytest.raises(TrainerLost, match=r"torchrun on node 10\.0\.0\.2 exited with 1"):
        cluster._wait(agents, timeout_s=5)


def test_a_rank_of_an_earlier_attempt_does_not_find_those_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict.fromkeys(("model_path", "batch_path", "output_dir", "result_path"), tmp_path)
    job = TrainJob(
        **places,  # type: ignore[arg-type]
        base_model_id="m",
        adapter_path=None,
        adapter_version=0,
        adapter_sha256="base",
        num_optimizer_steps=0,
        seed=0,
        num_threads=1,
        device="cpu",
        trainer=TrainerConfig(num_processes=2),
    )
    (tmp_path / "job.json").write_text("{}")
    argvs: list[list[str]] = []

    def start(kind: str, argv: list[str], *others: object) -> ProcessRef:
        argvs.append(argv)
        return node_agent.own_ref()

    monkeypatch.setattr(node_agent, "start", start)
    monkeypatch.setattr(cluster.ports, "free_port", lambda first_choice, host: first_choice)
    for _ in range(3):
        cluster._start(job, tmp_path / "job.json", tmp_path / "trainer.log", [node(1), node(2)], [])

    def value(argv: list[str], flag: str) -> str:
        return argv[argv.index(flag) + 1]

    attempts = [tuple(value(argv, flag) for flag in ("--rdzv-endpoint", "--rdzv-id")) for argv in argvs]
    assert [value(argv, "--node-rank") for argv in argvs] == ["0", "1"] * 3
    assert attempts[0::2] == attempts[1::2], "the ranks of an attempt meet"
    endpoints, ids = zip(*attempts[0::2], strict=True)
    assert len(set(ids)) == 3 and len(set(endpoints)) > 1


def test_an_agent_has_the_python_path_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and engine may need it there, as they do on this machine."""
    ray = MagicMock()
    ray.get.return_value = ("node", "10.0.0.2")
    for path, expected in (("/opt/mine", f"{CHECKOUT}{os.pathsep}/opt/mine"), ("", str(CHECKOUT))):
        monkeypatch.setenv("PYTHONPATH", path)
        connection._start_agent(ray, None, 0, 0, {})
        assert ray.remote.return_value.options.call_args.kwargs["runtime_env"]["env_vars"]["PYTHONPATH"] == expected


def test_an_agent_has_the_switches_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as versions of engine and trainer, which start there."""
    ray = MagicMock()
    ray.get.return_value = ("node", "10.0.0.2")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    connection._start_agent(ray, None, 0, 0, {})
    assert ray.remote.return_value.options.call_args.kwargs["runtime_env"]["env_vars"]["NVIDIA_TF32_OVERRIDE"] == "1"
