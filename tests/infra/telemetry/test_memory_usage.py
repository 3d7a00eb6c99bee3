"""Who holds how much, and the leak that is found by it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import becomes

from infra.failures import MemoryLeak
from infra.machine import devices, nvml
from infra.machine.nvml import GIB, Gpu, Holding, Reading
from infra.processes import children, gpu_programs
from infra.records import AdapterVersion, BaseModelRef, StepReport
from infra.telemetry import memory_usage
from infra.telemetry.memory_usage import ProgramMemory
from tasks import commit_step

History = list[dict[str, list[ProgramMemory]]]


def history(gib: list[float], *, phase: str = "after_release", process: str = "engine", programs: str = "a" * 20) -> History:
    return [{phase: [ProgramMemory(process, program, each)]} for each, program in zip(gib, programs, strict=False)]


def growing(by: float, *, to: int = 11, start: float = 100.0) -> list[float]:
    return [start * (1 + by * n / 10) for n in range(to)]


def test_growth_of_more_than_a_hundredth_over_ten_steps_names_process_phase_and_figures() -> None:
    found = memory_usage.leaks(history(growing(0.011)))
    assert [str(leak) for leak in found] == [
        "the engine (program a) holds 101.10 GiB in phase after_release, 10 steps ago it held 100.00: 1.1% more, allowed are 1%"
    ]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (history(growing(0.009)), "less than a hundredth"),
        (history(growing(0.5, to=10)), "only nine steps lie between"),
        (history([100, 120, *([100] * 9)]), "it came back"),
        (history([120, *([100] * 10)]), "it shrank"),
        (history(growing(0.5), programs="aaaaabbbbbb"), "another program since"),
        (history(growing(0.02, start=2.0)), "40 MiB more of two GiB: kernels that were loaded late"),
        (history(growing(0.5), phase="training", process="trainer"), "training hangs on the batch"),
        ([{}, *history(growing(0.5))[1:]], "not noted in the first of the steps"),
        (history([0.0, *([2.6] * 10)], process="trainer"), "it had not begun in the first of the steps"),
    ],
)
def test_what_is_no_leak(steps: History, why: str) -> None:
    assert memory_usage.leaks(steps) == [], why


def test_a_leak_is_found_in_each_phase_and_process_and_only_the_last_ten_steps_count() -> None:
    old = history([10.0] * 20 + growing(0.02), programs="a" * 31)
    assert len(memory_usage.leaks(old)) == 1
    for phase, process in (("inference", "engine"), ("training", "engine"), ("after_wake", "trainer"), ("inference", "trainer")):
        assert [leak.row.process for leak in memory_usage.leaks(history(growing(0.02), phase=phase, process=process))] == [
            process
        ]
    assert memory_usage.leaks(history([50.0] * 5 + [100.0] * 11, programs="a" * 16)) == []


def made(step: int) -> StepReport:
    adapter = AdapterVersion(
        run="r", version=1, base=BaseModelRef(id="m", sha256="s"), rank=4, alpha=8, target_modules=("q_proj",), seed=0
    )
    return StepReport(run="r", step=step, adapter=adapter, metrics={})


def test_a_step_that_shows_a_leak_ends_the_process_and_says_so_and_a_cpu_does_not(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, gib in enumerate(growing(0.02)):
        monkeypatch.setattr(
            memory_usage, "held", lambda gib=gib: [ProgramMemory("engine", "a", gib), ProgramMemory("trainer", "b", 2.6)]
        )
        memory_usage.note("r", step, "after_wake")
    ended = []
    monkeypatch.setattr(commit_step.engines, "stop_recorded", lambda: ended.append("engine"))
    monkeypatch.setattr(commit_step.resident, "stop_recorded", lambda: ended.append("trainer"))
    commit_step.stop_what_leaks(made(10))
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    commit_step.stop_what_leaks(made(9))
    with pytest.raises(
        MemoryLeak, match=r"step 10 of run 'r' is committed, but memory leaks: the engine \(program a\) holds 102\.00"
    ):
        commit_step.stop_what_leaks(made(10))
    assert ended == ["engine"]


def test_metrics_name_process_and_phase() -> None:
    rows = {
        "inference": [ProgramMemory("engine", "a", 114.0), ProgramMemory("trainer", "b", 2.6)],
        "training": [ProgramMemory("engine", "a", 2.4)],
    }
    assert memory_usage.metrics_of(rows) == {
        "memory/engine_inference_gib": 114.0,
        "memory/trainer_inference_gib": 2.6,
        "memory/engine_training_gib": 2.4,
    }


@pytest.fixture
def program(workspace: Path) -> children.ProcessRef:
    """A living program of this workspace that counts as a trainer."""
    argv = [sys.executable, "-c", "import time; time.sleep(120)"]
    ref = gpu_programs.start("trainer", argv, workspace / "log", {}, state_file=workspace / "trainer.json")
    yield ref
    gpu_programs.stop(ref)


def test_what_a_program_holds_is_its_resident_sets_and_on_gpus_the_drivers_word(
    workspace: Path, program: children.ProcessRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    if devices.device() == "cpu":
        (row,) = memory_usage.held()
        assert (row.process, row.program) == ("trainer", program.program)
        assert becomes(lambda: 0.001 < memory_usage.held()[0].gib < 1)  # it may only just have been started
    holdings = (Holding(0, program.pid, 3 * GIB), Holding(1, program.pid, 2 * GIB), Holding(0, os.getpid(), GIB))
    gpus = tuple(Gpu(n, f"GPU-{n}", 4 * GIB, 140 * GIB) for n in range(2))
    monkeypatch.setattr(nvml, "read", lambda: Reading(gpus, holdings))
    assert memory_usage.held() == [ProgramMemory("trainer", program.program, 5.0)]
    monkeypatch.setattr(nvml, "read", lambda: Reading(gpus, ()))
    assert memory_usage.held() == [ProgramMemory("trainer", program.program, 0.0)], "it lives, and is on no GPU"


def test_the_most_that_was_seen_is_noted_also_of_a_program_that_has_ended(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        [ProgramMemory("trainer", "b", 10.0)],
        [ProgramMemory("trainer", "b", 60.0), ProgramMemory("engine", "a", 2.4)],
        [ProgramMemory("engine", "a", 2.3)],
    ]
    turns = iter(said)
    seen = []

    def held() -> list[ProgramMemory]:
        rows = next(turns, said[-1])
        seen.append(rows)
        return rows

    monkeypatch.setattr(memory_usage, "held", held)
    monkeypatch.setattr(memory_usage, "SAMPLE_EVERY_S", {"cuda": 0.001, "cpu": 0.001})
    with memory_usage.most_noted("r", 0, "training"):
        while len(seen) < 4:
            subprocess.run(["true"], check=True)
    assert memory_usage.of_step("r", 0) == {"training": [ProgramMemory("trainer", "b", 60.0), ProgramMemory("engine", "a", 2.4)]}
