"""Two nodes that share a file system: two torchrun agents on this machine, over loopback."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.settings import Settings, settings
from infra.store.digests import sha256_of
from infra.trainers import join_node, multinode_jobs, torchrun
from infra.trainers.torchrun import TorchrunTrainer

Job = Callable[..., Any]


@pytest.fixture
def two_nodes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RATCHET_TRAINER_NODES", "2")
    monkeypatch.setenv("RATCHET_TRAINER_RENDEZVOUS", endpoint)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    settings.cache_clear()
    yield endpoint
    settings.cache_clear()


def test_two_nodes_of_one_process_give_the_result_of_one_node_of_two(
    two_nodes: str,
    new_job: Job,
    train_on_two: Callable[..., None],
    child_environment: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = {"num_processes": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
    expected, made = (new_job("qwen3-moe", **layout) for _ in range(2))
    train_on_two([expected])
    other = subprocess.Popen(
        [sys.executable, "-m", "infra.trainers.join_node", str(made.path), "1"],
        env=child_environment | dict(os.environ),
        cwd=Path(__file__).parents[3],
    )
    try:
        with caplog.at_level("INFO"):
            TorchrunTrainer().train(made.job, made.path.parent)
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
        other.wait()
    assert made.metrics == expected.metrics
    names = sorted(path.relative_to(expected.job.output_dir) for path in expected.job.output_dir.rglob("*.*"))
    assert len(names) == 7
    for name in names:
        assert (made.job.output_dir / name).read_bytes() == (expected.job.output_dir / name).read_bytes(), name
    assert f"RATCHET_TRAINER_RENDEZVOUS={two_nodes} python -m infra.trainers.join_node {made.path} NUMBER" in caplog.text


def test_each_node_starts_its_share_of_the_processes(two_nodes: str, new_job: Job) -> None:
    made = new_job(num_processes=6)
    run = sha256_of(made.path)[:32]  # known to those alone who can read the job
    for node in (0, 1):
        flags = " ".join(torchrun.command(made.job, str(made.path), node_rank=node))
        assert (
            f"--nnodes 2 --nproc-per-node 3 --rdzv-backend static --rdzv-endpoint {two_nodes} --node-rank {node} --rdzv-id {run} -m infra"
            in flags
        )


def test_what_cannot_be_spread_is_refused(two_nodes: str, new_job: Job) -> None:
    with pytest.raises(ValueError, match="num_processes 3 cannot be spread over RATCHET_TRAINER_NODES 2"):
        torchrun.command(new_job(num_processes=3).job, "job.json")
    with pytest.raises(ValueError, match="'persistent' with RATCHET_TRAINER_NODES 2"):
        torchrun.command(new_job(num_processes=2, mode="persistent").job, "--resident", "folder")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: "),
        (["job.json", "0"], "NODE_RANK 0 is none of 1 to 1"),
        (["job.json", "2"], "NODE_RANK 2 is none of 1 to 1"),
        (["nowhere.json", "1"], "nowhere.json is no job"),
    ],
)
def test_what_cannot_be_joined_is_refused(two_nodes: str, arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        join_node.argv_of(arguments)


def test_a_node_that_follows_takes_part_in_the_jobs_that_are_called_for(
    two_nodes: str, new_job: Job, child_environment: dict[str, str], workspace: Path
) -> None:
    multinode_jobs.make(new_job(num_processes=2).path)  # of an earlier allocation: no node waits for this one
    follower = subprocess.Popen(
        [sys.executable, "-m", "infra.trainers.join_node", "--follow", "1"],
        env=child_environment | dict(os.environ),
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert follower.stderr is not None and "waits for training jobs" in follower.stderr.readline()
        for _ in range(2):
            made = new_job(num_processes=2)
            TorchrunTrainer().train(made.job, made.path.parent)
            assert made.metrics
            assert f"takes part in {made.path}" in follower.stderr.readline()
    finally:
        follower.terminate()
        assert follower.wait(timeout=60) == 0


@pytest.mark.parametrize("endpoint", [{}, {"trainer_rendezvous": "node0"}, {"trainer_rendezvous": "tcp://node0:1"}])
def test_nodes_need_a_place_to_meet(endpoint: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"(?i)trainer_rendezvous"):
        Settings(trainer_nodes=2, **endpoint)  # type: ignore[arg-type]
