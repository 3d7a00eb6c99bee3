"""Two nodes of a cluster that share a file system: two torchrun agents on this machine, over loopback. Only the agents of Ray are played."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import connection
from infra.cluster.nodes import ClusterNode
from infra.trainers.cluster import ClusterTrainer

Job = Callable[..., Any]


class AgentHere:
    """Calls functions in this process."""

    def take_lock(self, who: str, ours: object) -> str:
        return ""

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, None]:
        return function(*arguments, **named), None

    def end(self) -> None: ...


def test_two_nodes_of_one_process_give_the_result_of_one_node_of_two(
    workspace: Path, new_job: Job, train_on_two: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"num_processes": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
    expected, made = (new_job("qwen3-moe", **layout) for _ in range(2))
    train_on_two([expected])
    nodes = [ClusterNode(f"127.0.0.1#{number}", "127.0.0.1", 0, AgentHere()) for number in range(2)]
    monkeypatch.setattr(connection, "living", lambda: nodes)
    ClusterTrainer().train(made.job, made.path.parent)
    assert made.metrics == expected.metrics
    names = sorted(path.relative_to(expected.job.output_dir) for path in expected.job.output_dir.rglob("*.*"))
    assert len(names) == 7
    for name in names:
        assert (made.job.output_dir / name).read_bytes() == (expected.job.output_dir / name).read_bytes(), name
