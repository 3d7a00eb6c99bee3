"""Memory of each program in each phase of a step, and whether it grows. As reported by NVML; on a CPU, resident sets.

A step's folder has memory/<phase>.json, with a row for each of our programs that ran then:

    inference       after the last sample
    after_release   when the engine has released its memory
    judging         when a second model has judged, before it releases its memory
    training        the maximum while the trainer ran
    after_wake      when the engine serves the new adapter
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from infra.machine import devices, nvml
from infra.processes import children, gpu_programs
from infra.store.files import read_note, write_note
from infra.store.layout import StepFolder

Phase = Literal["inference", "after_release", "judging", "training", "after_wake"]
PHASES: tuple[Phase, ...] = ("inference", "after_release", "judging", "training", "after_wake")
GIB = 2**30
NUM_STEPS = 10
MAX_GROWTH = 0.01
"""NUM_STEPS: Steps of one process, in one phase, over which growth is measured. MAX_GROWTH: Largest growth over them that is allowed."""
MIN_GROWTH_GIB = 0.0625
"""Smaller growth comes from kernels loaded late, not from a leak: 1% of a sleeping engine is 25 MiB."""
SAMPLE_EVERY_S = {"cuda": 0.5, "cpu": 2.0}


class ProgramMemory(NamedTuple):
    process: str
    """engine, trainer or reward_model."""
    program: str
    """Id of the program. A restarted program has another one."""
    gib: float


class Leak(NamedTuple):
    phase: str
    row: ProgramMemory
    before_gib: float
    num_steps: int

    def __str__(self) -> str:
        return (
            f"the {self.row.process} (program {self.row.program[:8]}) holds {self.row.gib:.2f} GiB in phase {self.phase}, "
            f"{self.num_steps} steps ago it held {self.before_gib:.2f}: {100 * (self.row.gib / self.before_gib - 1):.1f}% more, "
            f"allowed are {100 * MAX_GROWTH:g}%"
        )


def held() -> list[ProgramMemory]:
    """Return the memory of each of our programs that may use the GPUs."""
    reading = nvml.read()
    rows = []
    for program in gpu_programs.programs():
        on_gpus = sum(reading.of(children.of_program(reading.pids, program.id)).values())
        if not on_gpus and not children.members(program.id):
            continue
        num_bytes = on_gpus if reading.gpus else children.resident_bytes_of(program.id)
        rows.append(ProgramMemory(program.role, program.id, num_bytes / GIB))
    return rows


def note(run: str, step: int, phase: Phase) -> None:
    """Record the memory held now."""
    _write(run, step, phase, held())


@contextmanager
def most_noted(run: str, step: int, phase: Phase) -> Iterator[None]:
    """Poll while the block runs, and record each program's maximum."""
    most: dict[str, ProgramMemory] = {}
    done = threading.Event()

    def look() -> None:
        while True:
            for row in held():
                most[row.program] = max(row, most.get(row.program, row), key=lambda each: each.gib)
            if done.wait(SAMPLE_EVERY_S[devices.device()]):
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        _write(run, step, phase, list(most.values()))


def _write(run: str, step: int, phase: Phase, rows: list[ProgramMemory]) -> None:
    write_note(folder_of(run, step) / f"{phase}.json", [row._asdict() for row in rows])


def of_step(run: str, step: int) -> dict[str, list[ProgramMemory]]:
    """Return the rows by phase. A phase that was not recorded is missing."""
    noted = {path.stem: read_note(path, list[ProgramMemory]) for path in sorted(folder_of(run, step).glob("*.json"))}
    return {phase: rows for phase, rows in noted.items() if rows is not None}


def metrics_of(phases: Mapping[str, Sequence[ProgramMemory]]) -> dict[str, float]:
    """memory/<process>_<phase>_gib, summed over programs of one kind."""
    found: dict[str, float] = {}
    for phase, rows in phases.items():
        for row in rows:
            name = f"memory/{row.process}_{phase}_gib"
            found[name] = found.get(name, 0.0) + row.gib
    return found


def leaks(history: Sequence[Mapping[str, Sequence[ProgramMemory]]]) -> list[Leak]:
    """Return the memory that grew over the last NUM_STEPS steps. The latest step comes last. A shorter history gives no result.

    Only a program that ran during all of them is judged. The trainer's memory during training depends on the lengths in its batch
    and is not judged. Nor is what a program takes that held nothing at the beginning, as a trainer does before its first job.
    """
    if len(history) <= NUM_STEPS:
        return []
    window, found = history[-NUM_STEPS - 1 :], []
    for phase, rows in window[-1].items():
        for row in rows:
            series = [was.gib for step in window for was in step.get(phase, ()) if was.program == row.program]
            is_judged = len(series) == len(window) and (phase, row.process) != ("training", "trainer")
            if is_judged and series[0] > 0 and row.gib > series[0] * (1 + MAX_GROWTH) and row.gib - series[0] > MIN_GROWTH_GIB:
                found.append(Leak(phase, row, series[0], NUM_STEPS))
    return found


def leaks_of_run(run: str, step: int) -> list[Leak]:
    """Return the leaks in the records of the steps up to this one. On a CPU, resident sets include file caches and cannot show leaks."""
    if devices.device() == "cpu":
        return []
    return leaks([of_step(run, number) for number in range(max(0, step - NUM_STEPS), step + 1)])


def folder_of(run: str, step: int) -> Path:
    return StepFolder.at(run, step).memory
