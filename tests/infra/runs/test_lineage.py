"""The chain of a run's steps: manifests decide, gaps and foreign files are errors, and steps can be dropped."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from shared import RATCHET, write_manifest

from infra.config import DataConfig, EngineConfig, RunConfig
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.records import AdapterVersion
from infra.runs import lineage
from infra.runs.lineage import adapter_at, base_version
from infra.settings import CHECKOUT
from infra.store.digests import sha256_of
from infra.store.files import DigestMismatch, read_json, record_of, verified_adapter, write, write_json
from infra.store.layout import adapter_folder, run_folder, step_folder_of
from tasks.open_step import open_step
from tasks.support.preflight import open_run


@pytest.fixture
def config(workspace: Path, model_folder: Path) -> RunConfig:
    return RunConfig(name="r", model=str(model_folder), engine=EngineConfig(kind="scripted"), data=DataConfig(num_prompts=2))


def make_step(config: RunConfig, start: AdapterVersion) -> AdapterVersion:
    """Commit a step with the files of its adapter."""
    folder, version = adapter_folder(config.name, start.version + 1), start.version + 1
    files = {"weights": (ADAPTER_WEIGHTS, f"weights {version}"), "adapter_config": (ADAPTER_CONFIG, '{"lora_alpha": 16}')}
    records = {field: record_of(write(folder / name, text.encode())) for field, (name, text) in files.items()}
    made = start.model_copy(update={"version": version} | records)
    write_manifest(config, start, made)
    return made


@pytest.fixture
def made(config: RunConfig) -> list[AdapterVersion]:
    """Adapters 0 to 4 of a run of four steps."""
    open_run(config)
    found = [base_version(config)]
    for _ in range(4):
        found.append(make_step(config, found[-1]))
    return found


def test_steps_are_found_by_number(made: list[AdapterVersion]) -> None:
    assert lineage.committed_steps("r") == [0, 1, 2, 3]
    assert lineage.next_step("r") == 4
    lineage.check("r")


def test_a_gap_is_an_error_with_the_command_that_mends_it(config: RunConfig, made: list[AdapterVersion]) -> None:
    shutil.rmtree(step_folder_of("r", 1))
    with pytest.raises(ValueError, match=r"run 'r' has no committed step 1, but step 2: .* ratchet drop r --from 1$"):
        open_step.fn(config, None)
    command = [*RATCHET, "drop", "r", "--from", "1"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "run r goes on with step 1"
    step, adapter = open_step.fn(config, None)
    assert (step.index, adapter) == (1, made[1])
    assert sorted(path.name for path in (run_folder("r") / "adapters").iterdir()) == ["000001"]


def test_dropped_steps_take_their_adapters_and_evaluations_along(config: RunConfig, made: list[AdapterVersion]) -> None:
    evaluations = run_folder("r") / "evaluations"
    for version in (2, 3):
        write_json(evaluations / f"{version:06d}-abc-def" / "evaluation.json", {})
    removed = lineage.drop("r", 2)
    assert lineage.next_step("r") == 2 and adapter_at(config, 2) == made[2]
    assert not adapter_folder("r", 3).exists() and adapter_folder("r", 2).exists()
    assert [path.name for path in evaluations.iterdir()] == ["000002-abc-def"]
    assert {path.parent.name for path in removed} == {"steps", "adapters", "evaluations"}


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_that_the_run_has_not_cannot_be_dropped(made: list[AdapterVersion], step: int) -> None:
    with pytest.raises(ValueError, match=rf"run 'r' has no step {step} that could be dropped; its steps are 0, 1, 2, 3"):
        lineage.drop("r", step)


def test_steps_are_not_dropped_where_the_adapter_before_them_is_not_whole(made: list[AdapterVersion]) -> None:
    (adapter_folder("r", 2) / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"run 'r' cannot go on from step 2: .*000002/adapter_model.safetensors is missing"):
        lineage.drop("r", 2)
    assert lineage.next_step("r") == 4


def test_steps_are_not_dropped_where_an_adapter_that_samples_for_them_is_gone(config: RunConfig) -> None:
    """With max_staleness, steps made again are sampled again by older adapters than that of their start, which retention may have removed."""
    correction = config.trainer.loss.correction.but(max_staleness=2, mode="decoupled", kind="tis")
    config = config.but(trainer=config.trainer.but(loss=config.trainer.loss.but(correction=correction)))
    open_run(config)
    start = base_version(config)
    for _ in range(5):
        start = make_step(config, start)
    (adapter_folder("r", 2) / ADAPTER_WEIGHTS).unlink()
    write_json(adapter_folder("r", 2) / "removed.json", {"files": [ADAPTER_WEIGHTS]})
    for step in (3, 4):
        with pytest.raises(
            ValueError, match=rf"run 'r' cannot go on from step {step}: .*000002/adapter_model.safetensors was removed"
        ):
            lineage.drop("r", step)
    assert lineage.next_step("r") == 5
    lineage.drop("r", 1)
    assert lineage.next_step("r") == 1


@pytest.mark.parametrize("num_removed", range(4))
def test_no_evaluation_outlives_its_step_in_a_drop_that_is_interrupted(
    made: list[AdapterVersion], num_removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as one of the adapter that is made in the place of the dropped one."""
    evaluation = write_json(run_folder("r") / "evaluations/000004-abc-def/evaluation.json", {})
    removed: list[Path] = []

    def rmtree(path: Path) -> None:
        if len(removed) == num_removed:
            raise KeyboardInterrupt
        removed.append(path)
        real(path)

    real = shutil.rmtree
    monkeypatch.setattr(lineage.shutil, "rmtree", rmtree)
    if num_removed < 3:
        with pytest.raises(KeyboardInterrupt):
            lineage.drop("r", 3)
    else:
        lineage.drop("r", 3)
    assert lineage.next_step("r") == 3 or num_removed == 0
    assert not (evaluation.exists() and lineage.next_step("r") == 3)
    monkeypatch.undo()
    if (step_folder_of("r", 3)).exists():
        lineage.drop("r", 3)
    assert not evaluation.exists() and not adapter_folder("r", 4).exists()


def test_a_report_decides_nothing(config: RunConfig, made: list[AdapterVersion]) -> None:
    write_json(
        step_folder_of("r", 3) / "report.json", {"run": "r", "step": 0, "adapter": made[1].model_dump(mode="json"), "metrics": {}}
    )
    assert open_step.fn(config, None)[1] == made[4]


def test_a_manifest_of_another_step_is_refused(config: RunConfig, made: list[AdapterVersion]) -> None:
    shutil.copy(step_folder_of("r", 0) / "manifest.json", step_folder_of("r", 3) / "manifest.json")
    with pytest.raises(
        ValueError, match=r"steps/000003/manifest.json is that of step 0 of run 'r', which made adapter 1, not of step 3"
    ):
        open_step.fn(config, None)


@pytest.mark.parametrize("content", [b"", b'{"run": "r"', b"[]", b"{}"])
def test_a_manifest_that_cannot_be_read_is_named(config: RunConfig, made: list[AdapterVersion], content: bytes) -> None:
    (step_folder_of("r", 3) / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"steps/000003/manifest.json (is not a manifest|cannot be read)") as caught:
        open_step.fn(config, None)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("manifest.json") == 1
    assert str(caught.value).endswith("drop the step with `ratchet drop`") == (content not in (b"[]", b"{}"))


def test_a_chain_that_was_changed_in_the_middle_is_found(config: RunConfig, made: list[AdapterVersion]) -> None:
    path = step_folder_of("r", 2) / "manifest.json"
    content = read_json(path)
    content["adapter_in"]["weights"]["sha256"] = "f" * 64
    write_json(path, content)
    with pytest.raises(
        ValueError, match=r"steps/000002/manifest.json: step 2 started from adapter 2 \(ffff.*ratchet drop r --from 2"
    ):
        lineage.check("r")


def test_an_adapter_of_a_committed_step_is_not_replaced(made: list[AdapterVersion]) -> None:
    lineage.check_not_recorded("r", 2, made[2].sha256)
    lineage.check_not_recorded("r", 5, "e" * 64)
    with pytest.raises(DigestMismatch, match="adapters/000002 holds adapter 2 of a committed step"):
        lineage.check_not_recorded("r", 2, "e" * 64)


def test_a_changed_adapter_config_is_refused_before_it_is_used(made: list[AdapterVersion]) -> None:
    assert verified_adapter(made[4]) == adapter_folder("r", 4)
    (adapter_folder("r", 4) / ADAPTER_CONFIG).write_text(json.dumps({"lora_alpha": 800}))
    with pytest.raises(DigestMismatch, match=r"adapters/000004/adapter_config.json has changed"):
        verified_adapter(made[4])


def test_a_configuration_that_is_gone_comes_back_from_the_manifest(config: RunConfig, made: list[AdapterVersion]) -> None:
    path = run_folder("r") / "config.json"
    digest = sha256_of(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"sampling\.temperature"):
        open_run(config.but(sampling=config.sampling.but(temperature=0.5)))
    assert not path.exists()
    open_run(config)
    assert sha256_of(path) == digest


def test_a_configuration_that_was_changed_by_hand_decides_nothing(config: RunConfig, made: list[AdapterVersion]) -> None:
    other = config.but(sampling=config.sampling.but(temperature=0.5))
    write_json(run_folder("r") / "config.json", other.model_dump(mode="json"))
    with pytest.raises(ValueError, match=r"sampling\.temperature"):
        open_run(other)
