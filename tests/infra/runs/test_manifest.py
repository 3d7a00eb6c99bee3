import json
import subprocess
from pathlib import Path

import pytest
import shared

from infra.config import RunConfig
from infra.records import AdapterVersion, BaseModelRef, EngineRan, TrainerRan
from infra.runs.manifest import Environment, Ran, changes_at, differences, environment, program_changes, read_manifest
from infra.store import code_digest
from infra.store.files import read_json
from infra.store.layout import StepFolder


def other(**changes: object) -> Environment:
    return environment().model_copy(update=changes)


def test_the_environment_of_one_machine_is_the_same_each_time_and_names_all_that_counts() -> None:
    now = environment()
    assert now == environment()
    assert {"main.txt", "main-cuda.txt", "sglang-cpu.txt", "sglang-cuda.txt"} <= now.locks.keys()
    assert {"python", "torch", "megatron-core", "prefect", "mlflow"} <= now.versions.keys()
    assert now.machine.keys() == {"device", "processor", "num_cpu_threads"}
    assert now.machine["processor"]
    assert differences(now, now) == ()


def test_all_of_our_sources_are_named_one_by_one() -> None:
    now = environment()
    assert {"tasks/train.py", "infra/megatron/loss/logprobs.py", "flows/step.py"} <= now.sources.keys()
    assert now.code == code_digest.digest("flows", "tasks", "infra")


def test_what_differs_is_named() -> None:
    now = environment()
    before = other(
        sources={name: digest for name, digest in now.sources.items() if name != "tasks/score.py"} | {"tasks/train.py": "0"},
        locks=now.locks | {"main.txt": "0"},
        versions=now.versions | {"torch": "1.0"},
        machine=now.machine | {"num_cpu_threads": "999"},
    )
    assert differences(before, now) == (
        "sources: tasks/score.py, tasks/train.py",
        "locks: main.txt",
        f"versions: torch 1.0 -> {now.versions['torch']}",
        f"machine: num_cpu_threads 999 -> {now.machine['num_cpu_threads']}",
    )


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_says_whether_files_were_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    git(tmp_path, "tag", "v1")
    monkeypatch.setattr("infra.runs.manifest.CHECKOUT", tmp_path)
    head = git(tmp_path, "rev-parse", "HEAD")
    assert environment().commit == head
    (tmp_path / "a").write_text("2")
    assert environment().commit == f"{head}-dirty"


def test_no_checkout_has_no_commit_even_inside_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "one")
    (tmp_path / "installed").mkdir()
    monkeypatch.setattr("infra.runs.manifest.CHECKOUT", tmp_path / "installed")
    assert environment().commit == ""


def test_what_ran_in_a_step_is_in_its_manifest_and_what_the_next_one_ran_otherwise_is_named(
    workspace: Path, tiny_run: RunConfig
) -> None:
    start, made = (adapter_of(tiny_run, version) for version in (0, 1))
    first = read_manifest(shared.write_manifest(tiny_run, start, made).parent)
    before = Ran(first.engine, first.trainer, first.reward_source)
    assert {"python", "torch", "megatron-core"} <= before.trainer.versions.keys()
    assert before.engine.versions == {"scripted": "1"}
    engine = before.engine.model_copy(update={"versions": {"scripted": "2"}, "backends": {"lora_backend": "triton"}})
    trainer = TrainerRan(versions=before.trainer.versions | {"torch": "1.0"}, backends={})
    assert program_changes(before, before) == ()
    assert program_changes(before, before._replace(engine=engine, trainer=trainer)) == (
        "engine scripted: lora_backend None -> triton, scripted 1 -> 2",
        f"trainer: torch {before.trainer.versions['torch']} -> 1.0",
    )
    vllm = EngineRan(kind="vllm", identity="x", flags=(), versions={"vllm": "0.26.0"}, backends={})
    assert program_changes(before, before._replace(engine=vllm)) == (), "another kind is a change of the configuration"


def test_a_run_s_changes_are_those_of_each_step_and_one_that_cannot_be_read_is_passed_over(
    workspace: Path, tiny_run: RunConfig
) -> None:
    steps = [StepFolder.at(tiny_run.name, step).manifest for step in range(5)]
    for number, path in enumerate(steps):
        shared.write_manifest(tiny_run, *(adapter_of(tiny_run, version) for version in (number, number + 1)))
        told = read_json(path)
        told["trainer"]["versions"] = {"torch": "2.0" if number < 2 else "2.1"}
        path.write_text(json.dumps(told | ({"reward_source": "another"} if number == 2 else {})))
    assert changes_at(tiny_run.name, range(5)) == [
        (2, "trainer: torch 2.0 -> 2.1"),
        (2, "the source of the reward: these scores are of another state of it"),
        (3, "the source of the reward: these scores are of another state of it"),
    ]
    assert changes_at(tiny_run.name, [2]) == changes_at(tiny_run.name, range(5))[:2]
    steps[2].write_text("{")
    assert changes_at(tiny_run.name, range(7)) == []


def adapter_of(config: RunConfig, version: int) -> AdapterVersion:
    base = BaseModelRef(id="tiny", sha256="0" * 64)
    return AdapterVersion(run=config.name, version=version, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)


@pytest.fixture
def tiny_run() -> RunConfig:
    return RunConfig(name="r", model="tiny")
