"""A trainer that computes with the engine's experts: real programs, whose results must be those of a trainer with its own, byte for byte."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from infra.megatron.protocol import shared_experts
from infra.processes import children
from infra.store.files import read_json, write_json
from infra.trainers import resident
from infra.trainers.interface import TrainingFailed
from infra.trainers.resident import PersistentTrainer

Job = Callable[..., Any]
LENDER = str(Path(__file__).with_name("lender.py"))
LEFT = "experts: those of the engine's process"
FROM_FILES = "experts: read from"


class Lender:
    """A process with the experts of a model."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / shared_experts.FILE
        self.path.unlink(missing_ok=True)
        command = [sys.executable, LENDER, str(model), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def change_one_value(self) -> None:
        """As a fault of the memory would."""
        name = next(iter(read_json(self.path)["stacks"].values()))["file"]
        with (self.path.parent / name).open("r+b") as file:
            file.seek(4 * 1000)
            value = file.read(1)
            file.seek(4 * 1000)
            file.write(bytes([value[0] ^ 1]))


@pytest.fixture
def engine(model: Callable[[str], Path], tmp_path: Path) -> Iterator[Lender]:
    made = Lender(model("qwen3-moe"), tmp_path / "experts")
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def ended(workspace: Path) -> Iterator[None]:
    yield
    resident.stop_recorded()


@pytest.fixture
def new_shared(new_job: Job, engine: Lender) -> Job:
    return lambda **how: new_job("qwen3-moe", share_experts=True, job={"shared_experts": engine.path}, **how)


def run(made: Any) -> resident.TrainerState | None:
    PersistentTrainer().train(made.job, made.path.parent)
    return resident.recorded()


def log_of(made: Any) -> str:
    return str((made.path.parent / "trainer.log").read_text())


def refused(made: Any) -> str:
    with pytest.raises(TrainingFailed) as error:
        PersistentTrainer().train(made.job, made.path.parent)
    assert not made.job.result_path.exists() and not list(made.job.output_dir.rglob("*.safetensors"))
    return str(error.value)


def in_the_middle(made: Any, act: Callable[[], None]) -> threading.Thread:
    """Do something when a job's second micro-batch is done."""
    log_path = made.path.parent / "trainer.log"

    def wait() -> None:
        deadline = time.monotonic() + 120
        while not (log_path.exists() and "micro-batch 3/" in log_path.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_steps_with_the_engine_s_experts_are_those_of_a_trainer_with_its_own(
    new_shared: Job, new_job: Job, train: Job, engine: Lender, model: Callable[[str], Path]
) -> None:
    first, expected = new_shared(), train("qwen3-moe")
    state = run(first)
    assert LEFT in log_of(first) and FROM_FILES not in log_of(first)
    first.assert_same_bytes(expected)

    second, expected_second = new_shared(after=first), train("qwen3-moe", after=expected)
    assert run(second) == state
    assert LEFT not in log_of(second), "what is mapped is not compared again"
    second.assert_same_bytes(expected_second)

    # The engine has ended: the same program reads the files. Another engine lives: it is mapped.
    engine.kill()
    third = new_job("qwen3-moe", share_experts=True, after=second)
    expected_third = train("qwen3-moe", after=expected_second)
    assert run(third) == state
    assert FROM_FILES in log_of(third)
    third.assert_same_bytes(expected_third)
    again = Lender(model("qwen3-moe"), engine.path.parent)
    fourth = new_shared(after=third)
    assert run(fourth) == state
    assert LEFT in log_of(fourth) and FROM_FILES not in log_of(fourth)
    fourth.assert_same_bytes(train("qwen3-moe", after=expected_third))
    again.kill()


def test_an_engine_that_ends_in_the_middle_costs_its_step_no_bit(
    new_shared: Job, train: Job, make_batch: Job, engine: Lender
) -> None:
    many = {"batch": make_batch(num_sequences=300), "max_tokens_per_microbatch": 45}
    made = new_shared(**many)
    killer = in_the_middle(made, engine.kill)
    run(made)
    killer.join()
    assert resident.recorded() is None, "the program that had mapped the ended engine's memory has ended too"
    assert FROM_FILES in log_of(made)
    made.assert_same_bytes(train("qwen3-moe", **many))


def test_a_trainer_that_is_killed_maps_the_living_engine_s_experts_again(new_shared: Job, train: Job, make_batch: Job) -> None:
    """A copy of its own would find no room beside the engine."""
    many = {"batch": make_batch(num_sequences=300), "max_tokens_per_microbatch": 45}
    made = new_shared(**many)

    def kill() -> None:
        state = resident.recorded()
        assert state
        for each in children.members(state.process.program):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    killer = in_the_middle(made, kill)
    run(made)
    killer.join()
    assert resident.recorded() is None
    assert LEFT in log_of(made) and FROM_FILES not in log_of(made)
    made.assert_same_bytes(train("qwen3-moe", **many))


def test_a_trainer_that_sleeps_maps_nothing_of_the_engine(new_shared: Job, engine: Lender) -> None:
    """Else the memory would stay taken after the engine's end."""
    state = run(new_shared())
    assert state
    maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in children.members(state.process.program)]
    assert any("libtorch" in found for found in maps)
    assert not any(f"{engine.path.parent}/" in found for found in maps)


def test_an_engine_that_has_ended_when_its_job_begins_costs_no_step(new_shared: Job, train: Job, engine: Lender) -> None:
    engine.kill()
    made = new_shared()
    run(made)
    made.assert_same_bytes(train("qwen3-moe"))


def test_memory_that_changes_between_or_within_steps_makes_no_adapter(new_shared: Job, make_batch: Job, engine: Lender) -> None:
    first = new_shared()
    run(first)
    made = new_shared(after=first, batch=make_batch(num_sequences=300), max_tokens_per_microbatch=45)
    changer = in_the_middle(made, engine.change_one_value)
    assert "changed in the engine's memory" in refused(made)
    changer.join()
    assert "micro-batch 3/" in log_of(made)
    assert "changed in the engine's memory" in refused(second := new_shared(after=first))
    assert "micro-batch" not in log_of(second)


def test_an_engine_with_other_weights_is_no_lender(new_shared: Job, engine: Lender) -> None:
    engine.change_one_value()
    assert "decoder.layers.0.mlp.experts.gate_up of the engine's memory differs from" in refused(new_shared())
    about = read_json(engine.path)
    about["stacks"].pop("model.layers.1.mlp.experts.w2_weight")
    write_json(engine.path, about)
    assert "model.layers.1.mlp.experts.w2_weight of the engine is none" in refused(new_shared())


def test_a_file_of_a_process_that_has_ended_names_no_engine(engine: Lender) -> None:
    found = shared_experts.of_living_engine(engine.path)
    assert found is not None and found.process.pid == engine.process.pid and children.find(found.process) is not None
    assert (engine.path.stat().st_mode & 0o777) == 0o600
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.wait()
    assert shared_experts.of_living_engine(engine.path) is None
    assert shared_experts.of_living_engine(engine.path.with_name("none")) is None


def test_a_sum_sees_one_changed_bit_wherever_it_is() -> None:
    from infra.megatron.checkpoint.shared_experts import sums_of

    stack = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    before = sums_of(stack)
    for place in ((0, 0, 0), (2, 3, 7), (1, 2, 5)):
        changed = stack.clone()
        changed.view(torch.int16)[place] ^= 1
        assert (sums_of(changed) != before).nonzero().flatten().tolist() == [place[0]]
