"""How many samples an engine has at a time where the configuration leaves it to the machine: by the batch and its KV cache."""

from pathlib import Path

import pytest

from infra.colocation import engine_memory, plans
from infra.colocation.machine import Machine
from infra.config import RunConfig
from infra.config.tools.overrides import changed
from infra.forecast.shapes import model_of
from infra.machine import devices
from infra.machine.nvml import GIB

MODEL = model_of("qwen2.5-7b")
SIZES = ["engine.max_context_tokens=1024", "data.max_prompt_tokens=512", "sampling.max_output_tokens=512"]


@pytest.fixture
def gpu(workspace: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB, and 7B."""
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H100")
    monkeypatch.setattr(plans, "this_machine", lambda: Machine(True, 80 * GIB, False, 256 * GIB))
    monkeypatch.setattr(plans, "model_in", lambda folder: MODEL)


def running(model_folder: Path, *changes: str) -> int | None:
    config = changed(RunConfig(), [f"model={model_folder}", "engine.colocation=restart", *SIZES, *changes])
    return plans.resolve_colocation(config).engine.max_running_requests


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["data.num_prompts=64", "sampling.group_size=5"], 320),
        (["data.num_prompts=64", "sampling.group_size=5", "engine.replicas=3"], 107),
        (
            ["data.num_prompts=32", "sampling.group_size=8", "engine.deterministic=false", "data.num_oversampled_prompts=8"],
            320,
        ),
        (["data.num_prompts=128", "sampling.group_size=8"], 512),
        (["data.num_prompts=64", "sampling.group_size=5", "engine.max_running_requests=48"], 48),
    ],
)
def test_a_rollout_has_all_its_samples_at_a_time_up_to_what_was_measured(
    changes: list[str], expected: int, model_folder: Path, gpu: None
) -> None:
    assert running(model_folder, *changes) == expected


def test_samples_at_their_longest_fit_into_the_kv_cache(model_folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "this_machine", lambda: Machine(True, 24 * GIB, False, 256 * GIB))
    found = running(model_folder, "data.num_prompts=64", "engine.max_lora_rank=16")
    room = 0.8 * 24 * GIB - MODEL.weight_bytes - engine_memory.lora_pool_bytes(RunConfig().engine, MODEL)
    assert found == int(room / (2 * 28 * 4 * 128 * 2 * 1024)) and 60 < found < 100
    wider = running(model_folder, "data.num_prompts=64", "engine.kv_cache_dtype=fp8", "engine.quantization=fp8")
    assert wider is not None and wider > 4 * found
    assert running(model_folder, "engine.memory_fraction=0.1") == 1  # its start will say what it lacks
    monkeypatch.setattr(
        plans, "this_machine", lambda: Machine(False, 0, False, 256 * GIB)
    )  # a GPU that the driver does not tell of
    assert running(model_folder) is None


def test_on_a_cpu_it_is_64_whatever_the_batch(model_folder: Path, workspace: Path) -> None:
    engine = plans.resolve_colocation(RunConfig(model=str(model_folder))).engine
    assert (engine.max_running_requests, engine.running_requests) == (None, 64)
