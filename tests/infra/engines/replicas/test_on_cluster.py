"""Replicas over scripted servers on a real Ray cluster: two nodes, both on loopback of this machine, at one address or at two."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import connection, head, node_agent
from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.replicas.replica_set import ReplicaSet
from infra.engines.server import server_process
from infra.failures import EngineUnavailable, NodeLost
from infra.processes import children, lock_folder
from infra.records import AdapterVersion
from infra.settings import settings
from infra.store.layout import Workspace

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: python3 infra/setup/bootstrap.py --ray"),
]
MakeAdapter = Callable[[int], AdapterVersion]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(4)
]


@pytest.fixture
def cluster(over_scripted_server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head at 127.0.0.1, to be joined by this process after a second node."""
    for name, value in (head.environment() | {"RAY_AUTH_TOKEN": "0" * 32}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    import ray  # which reads its variables at the import
    from ray.cluster_utils import Cluster

    of_each = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
    made = Cluster(initialize_head=True, head_node_args=of_each)
    monkeypatch.setenv("RATCHET_CLUSTER_ADDRESS", made.address)
    settings.cache_clear()
    yield made
    server_process.stop_recorded()
    ray.shutdown()
    made.shutdown()
    connection._connected.cache_clear()


def add_node(cluster: Any, address: str) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, node_ip_address=address)


def ready(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def sampled(engine: Engine, adapter: AdapterVersion) -> list[Any]:
    request = RolloutRequest(PROMPTS, SamplingConfig(group_size=4, max_output_tokens=8), adapter)
    return sorted(engine.generate(request)[0], key=lambda sample: (sample.prompt_id, sample.sample_index))


def is_locked(folder: Path) -> bool:
    with (folder / "gpu.lock").open() as stream:
        return not lock_folder.try_to_lock(stream)


def gone_within(seconds: float, pids: set[int]) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_the_death_of_a_node_ends_its_programs_and_the_other_node_makes_its_samples(
    cluster: Any, engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    add_node(cluster, "127.0.0.2")
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind="sglang", replicas=2, request_timeout_s=20), adapter)
    first, second = sorted(server_process.all_recorded(), key=lambda state: state.url)  # that of this process, and the other
    assert first.url.startswith("http://127.0.0.1:") and second.url.startswith("http://127.0.0.2:")
    undisturbed = sampled(engine, adapter)
    assert len(undisturbed) == 16

    lost = connection.node_of(second.node)
    of_node = {lost.call(os.getpid), *(process.pid for process in children.members(second.process.program))}
    raylet = lost.call(os.getppid)
    os.kill(raylet, signal.SIGKILL)
    assert gone_within(30, of_node), "neither the agent nor the server outlives the raylet"
    with pytest.raises(NodeLost, match=r"^node 127\.0\.0\.2 (is|was) lost"):
        lost.call(node_agent.ping)
    assert sampled(engine, adapter) == undisturbed

    engine.wake()
    engine.load_adapter(adapter)
    again = server_process.recorded(second.replica)
    assert again is not None and again.node == first.node, "the replica was started again on the node that is left"
    assert sampled(engine, adapter) == undisturbed


def test_as_many_replicas_as_nodes_become_fewer_when_one_is_lost_between_two_rollouts(
    cluster: Any, engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    add_node(cluster, "127.0.0.2")
    adapter, config = scripted_adapter(1), engine_config.but(kind="sglang", replicas="auto", request_timeout_s=20)
    engine = ready(config, adapter)
    states = server_process.all_recorded()
    assert len(states) == 2 and {state.node.partition("#")[0] for state in states} == {"127.0.0.1", "127.0.0.2"}
    undisturbed = sampled(engine, adapter)
    second = next(state for state in states if state.node.startswith("127.0.0.2"))
    os.kill(connection.node_of(second.node).call(os.getppid), signal.SIGKILL)
    assert gone_within(30, {second.process.pid})

    again = ready(config, adapter)
    (left,) = server_process.all_recorded()
    assert left.node.startswith("127.0.0.1#") and not isinstance(again, ReplicaSet)
    assert left in states, "the first replica is on the node of this process, and was adopted"
    assert sampled(again, adapter) == undisturbed


def test_a_node_whose_agent_does_not_answer_is_lost(
    cluster: Any, engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(cluster, "127.0.0.2")
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind="sglang", replicas=2, request_timeout_s=20), adapter)
    undisturbed = sampled(engine, adapter)
    _, second = connection.living()
    monkeypatch.setattr(connection, "PING_S", 2.0)
    assert second.call(time.sleep, 5) is None, "a call may take longer, as long as the agent answers"
    agent = second.call(os.getpid)
    os.kill(agent, signal.SIGSTOP)
    try:
        with pytest.raises(NodeLost, match=r"^node 127\.0\.0\.2 is lost: its agent has not answered for 4 s$"):
            second.call(node_agent.ping)
        assert sampled(engine, adapter) == undisturbed
    finally:
        os.kill(agent, signal.SIGCONT)
    assert gone_within(30, {agent}), "an agent that was given up ends when it goes on"


def test_a_killed_part_of_a_replica_over_two_nodes_ends_its_rollout_and_the_next_launch_makes_the_same(
    cluster: Any,
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    set_fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_node(cluster, "127.0.0.2")
    monkeypatch.setenv("RATCHET_CLUSTER_ENGINE_NODES", "2")
    monkeypatch.setenv("RATCHET_CLUSTER_TRUSTED_NETWORK", "127.0.0.0/8")
    settings.cache_clear()
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind="sglang", tensor_parallel=2, request_timeout_s=120), adapter)
    (state,) = server_process.all_recorded()
    assert [part.node.partition("#")[0] for part in state.parts] == ["127.0.0.1", "127.0.0.2"]
    undisturbed = sampled(engine, adapter)

    second = state.parts[1].process.pid
    set_fault("hangs")  # as a part does that waits for another one
    threading.Timer(1, os.kill, (second, signal.SIGKILL)).start()
    with pytest.raises(EngineUnavailable, match=r"^part 1 of the engine, on node 127\.0\.0\.2, is gone; the end of .*-1\.log"):
        sampled(engine, adapter)
    assert gone_within(10, {state.process.pid}), "what is left of it is ended"
    set_fault("")
    engine.wake()
    engine.load_adapter(adapter)
    again = server_process.recorded()
    assert again is not None and len(again.parts) == 2 and again.launch > state.launch
    assert sampled(engine, adapter) == undisturbed


def test_each_node_has_a_lock_of_its_own_and_one_whose_agent_is_killed_ends_its_programs_and_is_free(
    cluster: Any, engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    add_node(cluster, "127.0.0.1")
    ready(engine_config.but(kind="sglang", replicas=2), scripted_adapter(1))
    first, second = connection.living()
    state = next(state for state in server_process.all_recorded() if state.node == second.key)
    folders = [node.call(lock_folder.folder) for node in (first, second)]
    assert sorted(folder.name for folder in folders) == ["127.0.0.1", "127.0.0.1#1"]
    assert {folder.parent for folder in folders} == {Workspace.here().locks_of_nodes}
    assert all(is_locked(folder) for folder in folders)
    os.kill(second.call(os.getpid), signal.SIGKILL)
    assert gone_within(30, {state.process.pid})
    deadline = time.monotonic() + 20  # its other programs, which hold the lock too, end a moment later
    while is_locked(folders[1]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [is_locked(folder) for folder in folders] == [True, False]
    with pytest.raises(NodeLost, match=r"^node 127\.0\.0\.1 is lost"):
        second.call(node_agent.ping)
