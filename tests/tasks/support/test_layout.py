"""The layout of a run on this machine: planned when it begins, kept when it goes on."""

import logging
from pathlib import Path

import pytest
from shared import write_manifest

from infra.colocation import plans
from infra.colocation.trainer_memory import model_in
from infra.config import RunConfig
from infra.config.tools.overrides import changed
from infra.forecast import remembered
from infra.forecast.shapes import GPU_KINDS, model_of
from infra.machine import devices, nvml
from infra.machine.nvml import Gpu, Reading
from infra.records import AdapterVersion, BaseModelRef
from infra.settings import settings
from infra.simulation import run_plan
from infra.store.files import read_json, write_json
from infra.store.layout import RunFolder, step_folder_of
from tasks.support.planning import layout

JUDGE = 'reward={"name": "rubric", "judge": {"by": "model", "model": "m", "rubric": "{completion}"}}'
H100 = GPU_KINDS["H100"].memory_bytes


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    return tmp_path


@pytest.fixture
def four(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four H100s and a 7B model."""
    see(monkeypatch, 4)
    monkeypatch.setattr(layout.base_model, "locate", lambda name: workspace)
    monkeypatch.setattr(layout, "model_in", lambda folder: model_of("qwen2.5-7b"))


def see(monkeypatch: pytest.MonkeyPatch, count: int, name: str = "NVIDIA H100 80GB HBM3", size: int = H100) -> None:
    gpus = tuple(Gpu(number, str(number), 0, size) for number in range(count))
    monkeypatch.setattr(nvml, "numbers", lambda: tuple(range(count)))
    monkeypatch.setattr(nvml, "name", lambda number: name)
    monkeypatch.setattr(nvml, "read", lambda: Reading(gpus))
    devices.device.cache_clear()
    devices.processor.cache_clear()


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    devices.device.cache_clear()
    devices.processor.cache_clear()


def run_of(*changes: str) -> RunConfig:
    sizes = ["name=mine", "data.num_prompts=64", "sampling.max_output_tokens=512", "engine.max_context_tokens=1024"]
    return changed(RunConfig(layout="auto"), [*sizes, *changes])


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("count", [0, 1])
def test_without_several_gpus_the_configuration_is_the_same_object(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, count)
    config = run_of()
    found, planned = layout.laid_out(config)
    assert found is config and planned is None


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("change", ["layout=by_hand", "engine.kind=scripted", "engine.kind=vllm", JUDGE])
def test_nothing_is_planned_by_hand_or_for_another_engine(change: str) -> None:
    config = run_of(change)
    assert layout.laid_out(config) == (config, None)


@pytest.mark.usefixtures("four")
def test_a_run_that_begins_is_planned_and_the_plan_is_on_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found, planned = layout.laid_out(run_of())
    assert planned is not None and found.trainer.num_processes == 4 and "layout auto on 4 x H100" in caplog.text
    layout.note_plan(found, planned)
    assert read_json(RunFolder.of("mine").layout)["fields"]["trainer.num_processes"] == 4
    assert read_json(RunFolder.of("mine").forecast)["parts"].keys() == planned.forecast.parts.keys()
    assert layout.words_of("mine") == planned.words != ""


@pytest.mark.usefixtures("four")
def test_a_run_that_goes_on_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = layout.laid_out(run_of())
    write_json(RunFolder.of("mine").config, found.model_dump(mode="json"))
    monkeypatch.setattr(run_plan, "plan_run", lambda *_: pytest.fail("it was planned again"))
    assert layout.laid_out(run_of()) == (found, None)
    assert layout.laid_out(found) == (found, None)
    see(monkeypatch, 8)
    again, planned = layout.laid_out(run_of("num_steps=40"))
    assert (again.trainer.num_processes, again.engine.replicas, planned) == (4, found.engine.replicas, None)
    assert layout.laid_out(run_of("engine.tensor_parallel=2"))[0].engine.tensor_parallel == 2


@pytest.mark.usefixtures("four")
def test_a_run_that_begins_again_as_another_one_is_planned_anew() -> None:
    write_json(RunFolder.of("mine").config, run_of("seed=3").model_dump(mode="json"))
    found, planned = layout.laid_out(run_of())
    assert planned is not None and found.trainer.num_processes == 4


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("name", "size"), [("NVIDIA L40S", 48 * 2**30), ("NVIDIA H100 MIG 1g.10gb", 10 * 2**30)])
def test_unknown_gpus_leave_the_layout_as_it_is_set(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    see(monkeypatch, 4, name, size)
    config = run_of()
    assert layout.laid_out(config) == (config, None)
    assert f"{name} is no GPU that the plan knows" in caplog.text


@pytest.mark.usefixtures("four")
def test_gpus_of_their_own_come_from_the_layout() -> None:
    older = ["trainer.loss.correction.mode=decoupled", "trainer.loss.correction.kind=tis"]
    older += ["trainer.loss.correction.max_staleness=1", "engine.colocation=separate_gpus"]
    found, _ = layout.laid_out(run_of(*older))
    first, count = found.trainer.first_gpu, found.trainer.num_processes
    assert plans.plan(found).colocation == "separate_gpus" and first >= 1
    assert devices.trainer_gpus(found.trainer) == list(range(first, first + count))
    engine = [
        number
        for replica in range(devices.num_replicas(found.engine))
        for number in devices.engine_gpus(found.engine.tensor_parallel, replica)
    ]
    assert sorted(engine) == list(range(first))


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["trainer.first_gpu=1", "engine.replicas=2"], "trainer.first_gpu 1 is one of the engine's 2 GPUs: set it to 2 or more"),
        (["trainer.first_gpu=3", "trainer.num_processes=2"], "asks for 5 GPUs, there are 4: lower one of them"),
        ([], "needs GPUs for each"),
    ],
)
def test_gpus_that_are_not_their_own_are_refused_in_one_line(changes: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        plans.plan(run_of("engine.colocation=separate_gpus", *changes))
    assert "\n" not in str(refused.value)


def test_a_first_gpu_without_gpus_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.first_gpu 2 with engine.colocation 'auto'"):
        run_of("trainer.first_gpu=2")


FIGURES = {"rollout/output_tokens": 160.0, "rollout/mean_output_tokens": 20.0, "time/train_s": 2.0}
FIGURES |= {"time/roll_out_s": 1.5, "time/step_s": 5.0}


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("earlier", ["other layout", "other machine", "another version's manifest"])
def test_rates_are_remembered_of_the_steps_made_as_the_last_one_was(
    earlier: str, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    """A run goes on with more replicas, or on another machine: what its earlier steps measured is no rate of these."""
    config, moved = run_of("engine.kind=scripted", f"model={model_folder}"), earlier != "other layout"
    start = AdapterVersion(
        run="mine", version=0, base=BaseModelRef(id="m", sha256="b"), rank=8, alpha=16, target_modules=("q_proj",), seed=0
    )
    for step in range(6):
        before = step < 3
        monkeypatch.setattr(devices, "processor", lambda before=before: "old" if earlier == "other machine" and before else "new")
        made = config if moved or not before else changed(config, ["trainer.num_processes=2"])
        start = start.model_copy(update={"version": step})
        write_manifest(made, start, start.model_copy(update={"version": step + 1}))
        tokens_per_s = 1000.0 if before else 100.0
        write_json(step_folder_of("mine", step) / "report.json", {"metrics": FIGURES | {"rollout/tokens_per_s": tokens_per_s}})
        if before and "version" in earlier:
            write_json(step_folder_of("mine", step) / "manifest.json", {"run": "mine"})
    layout.remember_rates(config, 6)
    (found,) = remembered.measured_of(config, model_in(model_folder)).values()
    assert (found.num_steps, found.engine_tokens_per_s) == (2, 100.0), "the first one of the three started the programs"
    layout.remember_rates(config, 2 if moved else 4)
    (same,) = remembered.measured_of(config, model_in(model_folder)).values()
    assert same == found, "too few steps: nothing new"
