"""What a trainer's programs listen on, and what somebody who reaches those ports can do."""

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from shared import becomes

from infra.processes import children
from infra.trainers import resident
from infra.trainers.resident import PersistentTrainer

INTRUDER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=3))
store.set("torch.rendezvous.none", sys.argv[2])
"""
"""Who reaches a port; torch's agent unpickles what lies under this key."""
AGENT_READS_WITHIN_S = 12.0
"""torch's agent reads its rendezvous state every five seconds."""


class RunsCode:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def trainer(workspace: Path, new_job: Callable[..., Any]) -> Iterator[resident.TrainerState]:
    """A persistent trainer with two ranks that has done a job and waits for the next."""
    made = new_job(num_processes=2, mode="persistent")
    PersistentTrainer().train(made.job, made.path.parent)
    state = resident.recorded()
    assert state is not None
    yield state
    resident.stop_recorded()


def listening(state: resident.TrainerState) -> list[Any]:
    """Addresses on which the trainer's whole process tree listens."""
    tree = children.members(state.process.program)
    assert len(tree) >= 3, "torchrun and two ranks"
    return [c.laddr for p in tree for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_a_trainer_on_one_node_listens_on_loopback_only(trainer: resident.TrainerState) -> None:
    assert [address for address in listening(trainer) if address.ip not in ("127.0.0.1", "::1")] == []


def test_a_pickle_that_is_written_to_a_port_of_a_trainer_is_not_loaded(trainer: resident.TrainerState, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    content = base64.b64encode(pickle.dumps(RunsCode(planted))).decode()
    attempts = [subprocess.Popen([sys.executable, "-c", INTRUDER, str(address.port), content]) for address in listening(trainer)]
    becomes(lambda: all(attempt.poll() is not None for attempt in attempts), within_s=15)
    for attempt in attempts:  # where the port speaks another protocol, the client waits without end
        attempt.kill()
    assert not becomes(planted.exists, within_s=AGENT_READS_WITHIN_S)
    assert children.find(trainer.process) is not None
