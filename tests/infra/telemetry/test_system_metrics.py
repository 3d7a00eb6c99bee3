"""What is sampled of this machine, and how little of it is kept."""

import itertools

import pytest

from infra.machine import nvml
from infra.machine.nvml import Gpu, Reading
from infra.processes import gpu_programs
from infra.telemetry import system_metrics
from infra.telemetry.system_metrics import AT, Sampler


@pytest.mark.parametrize("seconds", [10, 100, 1000, 100_000])
def test_a_long_step_has_no_more_rows_than_a_short_one(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(system_metrics, "now", lambda: {AT: clock[0]})
    sampler = Sampler()
    for _ in range(seconds):
        sampler.look()
        clock[0] += 1.0
    times = [row[AT] for row in sampler.rows]
    assert min(seconds - 1, system_metrics.MAX_ROWS // 2) <= len(times) <= system_metrics.MAX_ROWS
    gaps = {after - before for before, after in itertools.pairwise(times)}
    assert max(gaps) <= 2 * min(gaps), "the rows are not spread evenly"
    assert times[0] == 1001.0 and times[-1] >= 1000.0 + seconds - 2 * max(gaps, default=1.0)


@pytest.mark.usefixtures("workspace")
def test_rows_are_of_the_block_that_is_running() -> None:
    with system_metrics.record_system_metrics():
        while not system_metrics.rows():
            pass
        [row, *_] = system_metrics.rows()
        assert row["system/system_memory_usage_megabytes"] > 10
        assert 0 <= row["system/cpu_utilization_percentage"] <= 100
    assert system_metrics.rows() == []


def test_a_machine_that_cannot_be_asked_gives_no_rows_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, int]:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(gpu_programs, "resident_bytes", broken)
    sampler = Sampler()
    sampler.next_at = 0.0
    sampler.look()
    assert sampler.rows == []


@pytest.mark.usefixtures("workspace")
def test_gpus_are_told_apart_by_the_drivers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu(0, "GPU-a", 1000 * 2**20, 2**37), Gpu(1, "GPU-b", 2048 * 2**20, 2**37))
    monkeypatch.setattr(nvml, "read", lambda: Reading(gpus))
    monkeypatch.setattr(nvml, "busy_percent", lambda number: {0: 35, 1: 0}[number])
    monkeypatch.setattr(gpu_programs, "resident_bytes", lambda: {"trainer": 3 * 2**20})
    row = system_metrics.now()
    assert row["system/gpu_0_utilization_percentage"] == 35 and row["system/gpu_1_memory_usage_megabytes"] == 2048
    assert row["system/trainer_memory_megabytes"] == 3
