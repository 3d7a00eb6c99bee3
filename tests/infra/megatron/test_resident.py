"""The trainer that stays: real programs, whose results must be those of a program of their own, byte for byte."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.megatron.model import attention
from infra.megatron.program import serve as waiting
from infra.megatron.protocol.mailbox import Mailbox, Owner, QueuedJob, State
from infra.processes import children
from infra.settings import CHECKOUT
from infra.store.digests import Stamp
from infra.trainers import resident
from infra.trainers.interface import TrainerLost, TrainingFailed
from infra.trainers.resident import PersistentTrainer

Job = Callable[..., Any]
HANG_S = 60.0
"""Enough for a program to start and do a tiny job, here under load too."""


@pytest.fixture(autouse=True)
def ended(workspace: Path) -> Iterator[None]:
    yield
    resident.stop_recorded()


def run(made: Any) -> resident.TrainerState:
    PersistentTrainer().train(made.job, made.path.parent)
    state = resident.recorded()
    assert state is not None
    return state


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_steps_in_one_program_are_those_of_programs_of_their_own(new_job: Job, train: Job, make_batch: Job) -> None:
    first = train("qwen3-moe")
    kept = new_job("qwen3-moe")
    state = run(kept)
    kept.assert_same_bytes(first)
    assert "micro-batch 1/1  " in (kept.path.parent / "trainer.log").read_text()

    bad = make_batch()
    bad["tokens"][0] = 999
    with pytest.raises(TrainingFailed, match="token id 999 is out of the vocabulary"):
        PersistentTrainer().train((made := new_job("qwen3-moe", batch=bad)).job, made.path.parent)

    second, again = train("qwen3-moe", after=first), new_job("qwen3-moe", after=kept)
    assert run(again).process == state.process
    again.assert_same_bytes(second)
    assert {"wake", "adapter", "train", "export"} < set(again.result.seconds)
    # The job in between was refused, and left nothing that was kept; the next one finds what this one has left.
    assert "its optimizer state: read from" in (again.path.parent / "trainer.log").read_text()
    third = new_job("qwen3-moe", after=again)
    assert run(third).process == state.process
    assert "its optimizer state: kept" in (third.path.parent / "trainer.log").read_text()
    third.assert_same_bytes(train("qwen3-moe", after=second))

    # The step's process goes away, and nobody comes.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    owner = children.ref_of(gone.pid)
    gone.wait()
    Mailbox(state.folder).register_owner(Owner(process=owner, grace_s=0.1))
    wait_for(lambda: children.find(state.process) is None)
    assert "Traceback" not in state.log_path.read_text()


def test_a_program_that_is_started_early_waits_and_does_the_first_job(new_job: Job, train: Job) -> None:
    made = new_job()
    early = made.job.model_copy(update={"batch_path": Path(), "output_dir": Path(), "result_path": Path()})
    resident.start_early(early)
    state = resident.recorded()
    assert state is not None
    wait_for(lambda: Mailbox(state.folder).state() is not None)
    resident.start_early(early)
    assert run(made) == state, "the same program, and no other"
    assert made.result.seconds["import"] < 1, "it had imported its libraries"
    made.assert_same_bytes(train())


def test_a_program_that_is_started_early_and_dies_costs_no_step(new_job: Job, train: Job) -> None:
    made = new_job()
    resident.start_early(made.job)
    state = resident.recorded()
    assert state is not None
    os.kill(state.process.pid, signal.SIGKILL)
    wait_for(lambda: children.find(state.process) is None)
    assert run(made).process != state.process
    made.assert_same_bytes(train())


def test_a_program_that_cannot_be_started_early_is_no_error_yet(new_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(resident, "_launch", fail)
    resident.start_early(new_job().job)


def test_a_program_that_dies_in_the_middle_is_replaced(new_job: Job, train: Job, make_batch: Job) -> None:
    large = make_batch(num_sequences=300)
    expected, made = train(batch=large, max_tokens_per_microbatch=45), new_job(batch=large, max_tokens_per_microbatch=45)
    log_path, killed = made.path.parent / "trainer.log", []

    def kill() -> None:
        wait_for(lambda: log_path.exists() and "micro-batch 3/" in log_path.read_text())
        state = resident.recorded()
        assert state is not None
        killed.extend(Mailbox(state.folder).ranks())
        os.kill(killed[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = PersistentTrainer().train(made.job, made.path.parent)
    killer.join()
    assert "wake" not in result.seconds
    made.assert_same_bytes(expected)
    assert resident.recorded() is None
    assert [children.find(rank) for rank in killed] == [None]


def test_two_ranks_stay_together_until_another_layout_is_asked_for(new_job: Job, train: Job) -> None:
    first = new_job(num_processes=2, tensor_parallel=2)
    state = run(first)
    second = new_job(after=first, num_processes=2, tensor_parallel=2)
    assert run(second).process == state.process
    ranks = Mailbox(state.folder).ranks()
    assert len(ranks) == 2
    for name, value in train().adapter.items():
        torch.testing.assert_close(first.adapter[name], value, atol=1e-3, rtol=0)

    other = run(new_job(dtype="bfloat16"))
    assert other.process != state.process
    assert [children.find(rank) for rank in (state.process, *ranks)] == [None] * 3

    # As on a reboot, or by a person's hand.
    os.kill(other.process.pid, signal.SIGTERM)
    wait_for(lambda: all(children.find(rank) is None for rank in (other.process, *Mailbox(other.folder).ranks())))
    assert not resident.stop_recorded()


def said(num_done: int) -> State:
    return State(num_done=num_done, exit_code=0, held_bytes=0, sleep_s=0.0)


class DoneAtThe20thLook(Mailbox):
    looks = reads = 0

    def state_stamp(self) -> Stamp | None:
        self.looks += 1
        if self.looks == 20:
            self.publish_state(said(3))
        return super().state_stamp()

    def state(self) -> State | None:
        self.reads += 1
        return super().state()


@pytest.mark.parametrize("before", [[], [said(2)]])
def test_only_what_was_said_anew_is_read(before: list[State], tmp_path: Path) -> None:
    box = DoneAtThe20thLook(tmp_path)
    for state in before:
        box.publish_state(state)
    assert resident._wait(box, 3, children.ref_of(os.getpid()), timeout_s=60) == said(3)
    assert (box.looks, box.reads) == (20, len(before) + 1)


class ComesAfterAMinute(Mailbox):
    """Its next order comes after 60 s of a clock that only sleeping moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.now, self.times = 1000.0, list[float]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.advance)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def get(self, kind: str, number: int) -> QueuedJob | None:
        self.times.append(self.now)
        return QueuedJob(job=Path("job.json")) if self.now >= 1060 else None


@pytest.mark.parametrize("wait", [waiting._next_job, waiting._next_turn])
def test_a_trainer_that_waits_long_looks_seldom_for_its_next_job(
    wait: Callable[[Mailbox, int, waiting.Signals], QueuedJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("jobs").mkdir()
    signals = waiting.Signals.__new__(waiting.Signals)  # without a handler in the test's process
    signals.asked_to_end = signals.busy = False
    box = ComesAfterAMinute(tmp_path, monkeypatch)
    box.register_owner(Owner(process=children.ref_of(os.getpid()), grace_s=900.0))
    assert wait(box, 1, signals).job is not None
    first_second = [each for each in box.times if each < 1001]
    last_ten = [each for each in box.times if each >= 1050]
    assert len(first_second) >= 190, "a job that comes soon is taken at once"
    assert len(last_ten) <= 21 * 10


def test_attention_is_loaded_before_the_first_job_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box, loaded = Mailbox(tmp_path), list[object]()
    box.open()
    monkeypatch.setattr(attention, "load_ahead", lambda: loaded.append(box.state()))
    monkeypatch.setattr(waiting, "Signals", lambda: SimpleNamespace(asked_to_end=True, busy=False))
    monkeypatch.setattr(waiting, "_end_with", lambda parent: None)
    assert waiting.serve(tmp_path, lambda path, session: 1) == 0
    assert loaded == [None]
    assert box.state() is not None


def test_the_last_word_of_a_program_that_has_ended_counts(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    program, box = children.ref_of(gone.pid), Mailbox(tmp_path)
    gone.wait()
    for num_done, found in ((None, None), (2, None), (3, said(3))):
        if num_done is not None:
            box.publish_state(said(num_done))
        assert resident._wait(box, 3, program, timeout_s=60) == found


def test_ranks_do_not_outlive_their_torchrun(new_job: Job) -> None:
    state = run(new_job())
    ranks = Mailbox(state.folder).ranks()
    os.kill(state.process.pid, signal.SIGKILL)
    wait_for(lambda: all(children.find(rank) is None for rank in ranks))


FIRST_OWNER = """
import sys
from pathlib import Path
from infra.megatron.protocol.job import TrainJob
from infra.trainers.resident import PersistentTrainer

path = Path(sys.argv[1])
PersistentTrainer().train(TrainJob.model_validate_json(path.read_bytes()), path.parent)
"""


def test_another_process_takes_the_program_over_unless_it_is_busy_for_nobody(
    new_job: Job, train: Job, child_environment: dict[str, str], workspace: Path
) -> None:
    first, second, third = (new_job() for _ in range(3))
    environment = child_environment | {"RATCHET_WORKSPACE": str(workspace)}
    subprocess.run([sys.executable, "-c", FIRST_OWNER, str(first.path)], env=environment, cwd=CHECKOUT, check=True)
    left = resident.recorded()
    assert left is not None and children.find(left.process)

    adopted = run(second)
    assert adopted == left
    assert "wake" in second.result.seconds
    expected = train()
    first.assert_same_bytes(expected)
    second.assert_same_bytes(expected)

    # As if its owner had died in the middle of a job.
    box = Mailbox(adopted.folder)
    stuck = [adopted.process, *box.ranks()]
    os.kill(stuck[1].pid, signal.SIGSTOP)
    box.put("jobs", box.num_orders() + 1, QueuedJob(job=first.path))
    assert run(third).process != adopted.process
    assert [children.find(process) for process in stuck] == [None] * 2
    third.assert_same_bytes(expected)


@pytest.mark.full  # its sample, without the minute of waiting, is the test below
def test_a_program_that_hangs_is_ended_in_time_and_a_fresh_one_does_the_job(new_job: Job, train: Job) -> None:
    first, second = (new_job(timeout_s=HANG_S) for _ in range(2))
    state = run(first)
    ranks = Mailbox(state.folder).ranks()
    os.kill(ranks[0].pid, signal.SIGSTOP)
    begin = time.monotonic()
    PersistentTrainer().train(second.job, second.path.parent)
    assert time.monotonic() - begin > HANG_S
    assert "wake" not in second.result.seconds
    second.assert_same_bytes(train())
    assert resident.recorded() is None
    assert [children.find(process) for process in (state.process, *ranks)] == [None] * 2


def test_a_job_that_takes_too_long_for_a_fresh_program_too_is_an_error(new_job: Job, workspace: Path) -> None:
    made, seen = new_job(timeout_s=0.5), []

    def look() -> None:
        wait_for(lambda: (state := resident.recorded()) is not None and not seen.append(state.process))

    watcher = threading.Thread(target=look)
    watcher.start()
    with pytest.raises(TrainerLost, match=r"0\.5 s"):
        PersistentTrainer().train(made.job, made.path.parent)
    watcher.join()
    assert seen and [children.find(process) for process in seen] == [None]
    assert resident.recorded() is None
    assert not made.job.result_path.exists()
    assert not list(made.job.output_dir.iterdir())
