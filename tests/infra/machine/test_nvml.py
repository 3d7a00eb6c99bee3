"""What the driver says is read right; a stand-in for NVML, which needs a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from infra.machine import devices, nvml

GIB = 2**30


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """H200s, GPU n with n + 1 GiB in use: 1 GiB by process 10 + n, the rest by one that the driver gives no figure for."""

    def processes(number: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=10 + number, usedGpuMemory=GIB), SimpleNamespace(pid=99, usedGpuMemory=None)]

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUUID": lambda number: f"GPU-{number}abc",
        "nvmlDeviceGetName": lambda number: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda number, version: SimpleNamespace(used=(number + 1) * GIB, total=140 * GIB),
        "nvmlDeviceGetComputeRunningProcesses": processes,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml._handles.cache_clear()
    yield
    nvml._handles.cache_clear()


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    nvml._handles.cache_clear()
    assert nvml.numbers() == () and nvml.read() == nvml.Reading()
    nvml._handles.cache_clear()


def test_a_driver_that_is_there_and_does_not_answer_is_no_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml._handles.cache_clear()
    with pytest.raises(RuntimeError, match=r"does not answer: RM has detected an NVML/RM version mismatch\. Mend it"):
        nvml.numbers()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nvml.numbers() == ()
    nvml._handles.cache_clear()


def test_a_part_of_a_gpu_is_refused(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8f6c")
    with pytest.raises(ValueError, match=r"MIG-8f6c, a part of a GPU \(MIG\): whole GPUs only"):
        nvml.numbers()


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [(None, (0, 1, 2, 3)), ("2", (2,)), ("3, 1", (3, 1)), ("", ()), ("GPU-2ab", (2,)), ("GPU-9", ())],
)
def test_only_visible_gpus_count(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, numbers: tuple[int, ...]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.numbers() == numbers and devices.num_gpus() == len(numbers)
    assert [gpu.number for gpu in nvml.read().gpus] == list(numbers)
    assert devices.gpu_memory_used_bytes() == sum(number + 1 for number in numbers) * GIB


def test_memory_is_told_by_gpu_and_process(four_gpus: None) -> None:
    reading = nvml.read()
    assert reading.gpus[2] == nvml.Gpu(2, "GPU-2abc", 3 * GIB, 140 * GIB)
    assert reading.of({11, 12, 99}) == {1: GIB, 2: GIB}
    assert reading.holders(3) == "pid 13: 1.0 GiB"
