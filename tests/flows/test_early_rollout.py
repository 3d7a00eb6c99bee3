"""A run whose next work is the next step's rollout has the engine begin it at once. A real trainer, a scripted engine."""

import logging
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prefect.states import State

from flows.run import rl_run
from flows.step import rl_step
from infra.config import EnvironmentConfig, EvaluationConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.eval_records import RunReport
from infra.failures import EngineUnavailable, WrongAnswer
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import run_folder

NUM_STEPS = 2

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    trainer = scripted.trainer.but(mode="persistent")
    return scripted.but(num_steps=NUM_STEPS, trainer=trainer, evaluation=EvaluationConfig(every=0))


def run(config: RunConfig) -> State[RunReport]:
    return rl_run.with_options(result_storage=settings().results)(config, return_state=True)


def in_step(step: int, name: str) -> Any:
    return read_json(run_folder("r") / f"steps/{step:06d}/{name}.json")


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each: the adapter's version, and whether it began early."""
    sample, made = ScriptedEngine.sample, []

    def noted(engine: ScriptedEngine, missing: Any, sampling: Any, adapter: Any, *given: Any, **how: Any) -> Any:
        made.append((adapter.version, threading.current_thread() is not threading.main_thread()))
        return sample(engine, missing, sampling, adapter, *given, **how)

    monkeypatch.setattr(ScriptedEngine, "sample", noted)
    return made


class Waits(NamedTuple):
    """Files and folders that this process synced to the disk, in order."""

    all: list[str]
    early: list[str]
    """Those synced by the prefetched rollout before its first request to the engine."""


@pytest.fixture
def waits(rollouts: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> Waits:
    fsync, found = os.fsync, Waits([], [])

    def noted(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.all.append(path.removeprefix(f"{run_folder('r')}/"))
        is_early = any(frame.filename.endswith("tasks/support/prefetch_rollout.py") for frame in traceback.extract_stack())
        if is_early and len(rollouts) < NUM_STEPS:
            found.early.append(path)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_the_next_rollout_begins_before_its_step_and_is_the_one_that_its_step_would_have_made(
    config: RunConfig, rollouts: list[tuple[int, bool]], waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken, wake = [], ScriptedEngine.wake
    monkeypatch.setattr(ScriptedEngine, "wake", lambda engine: woken.append(threading.current_thread()) or wake(engine))
    made = run(config).result()
    assert woken.count(threading.main_thread()) == 4, "at the first step's beginning, its rollout, and each step's end"
    assert rollouts == [(0, False), (1, True)]
    assert waits.early == [], "the adapter's files are on their way there: it takes as long as they do"
    assert in_step(1, "began")["at"] < in_step(0, "manifest")["committed_at"]
    assert in_step(1, "report")["metrics"]["time/roll_out_s"] > 0
    assert not (run_folder("r") / f"steps/{NUM_STEPS:06d}").exists(), "there is no such step"
    alone = config.but(name="alone")
    for _ in range(NUM_STEPS):
        last = rl_step.with_options(result_storage=settings().results)(alone)
    assert rollouts[NUM_STEPS:] == [(0, False), (1, False)]
    assert last.adapter.sha256 == made.latest.sha256


def test_what_training_left_reaches_the_disk_in_the_commit_and_not_before(config: RunConfig, waits: Waits) -> None:
    run(config.but(num_steps=1)).result()
    waited = [path.partition(f".{os.getpid()}-")[0] for path in waits.all]  # without the rest of a partial file's name
    begins, ends = waited.index("adapters/000001/adapter_model.safetensors"), waited.index("steps/000000/manifest.json")
    for name in ("adapters", "adapters/000001", "adapters/000001/state/made_from.json", "steps/000000/train/result.json"):
        assert name in waited[begins:ends], f"{name} is not on the disk before the manifest is"
    before = [path for path in waited[:begins] if path == "adapters" or path.endswith(("made_from.json", "result.json"))]
    assert before == [], "the engine waits for them"


def test_where_an_evaluation_comes_first_the_rollout_waits_for_its_step(
    config: RunConfig, rollouts: list[tuple[int, bool]]
) -> None:
    run(config.but(evaluation=EvaluationConfig(every=1, num_prompts=4))).result()
    assert {version for version, _ in rollouts} == {0, 1, 2} and not any(is_early for _, is_early in rollouts)


def test_episodes_of_the_next_step_begin_before_it_too(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    game = EnvironmentConfig(name="infra.environments.examples.digits.Digits", workers=4)
    context = config.engine.but(max_context_tokens=1024)
    with caplog.at_level(logging.INFO, "tasks.support.episode_rollout"):
        made = run(config.but(environment=game, engine=context)).result()
    assert made.num_steps == NUM_STEPS
    assert in_step(1, "measures/roll_out")["began_at"] < in_step(0, "manifest")["committed_at"]
    assert [line for line in caplog.messages if "episodes, " in line] == [
        line for line in caplog.messages if "16 episodes, 0 of" in line
    ]
    assert len([line for line in caplog.messages if "episodes, " in line]) == NUM_STEPS, "each is played once"


def failing_at_its_first_early_rollout(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    sample, failed = ScriptedEngine.sample, []

    def sample_or_fail(engine: ScriptedEngine, *given: Any, **how: Any) -> Any:
        if not failed and threading.current_thread() is not threading.main_thread():
            failed.append(True)
            raise error
        return sample(engine, *given, **how)

    monkeypatch.setattr(ScriptedEngine, "sample", sample_or_fail)


@pytest.mark.full  # its sample is the wrong answer below
def test_an_engine_that_dies_in_an_early_rollout_is_a_case_for_the_step_s_own_retry(
    config: RunConfig, rollouts: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at_its_first_early_rollout(monkeypatch, EngineUnavailable("it is away"))
    assert run(config).result().num_steps == NUM_STEPS
    assert rollouts == [(0, False), (1, False)]


def test_a_wrong_answer_in_an_early_rollout_fails_the_step_that_needs_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at_its_first_early_rollout(monkeypatch, WrongAnswer("of another adapter"))
    failed = run(config)
    assert failed.is_failed() and "of another adapter" in (failed.message or "")
    steps = run_folder("r") / "steps"
    assert [path.parent.name for path in steps.glob("*/manifest.json")] == ["000000"]
    assert "of another adapter" in in_step(1, "evidence/roll_out-0")["error"]


def is_at_work() -> bool:
    """Whether a thread of this process makes a prefetched rollout."""
    frames = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
    return any(entry.filename.endswith("infra/concurrency/prefetch.py") for stack in frames for entry in stack)


def test_a_run_that_fails_leaves_no_rollout_at_work_and_goes_on_from_what_reached_the_disk(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    synced: list[Path] = []

    def fail_once_synced(folder: Path) -> None:
        synced.append(folder)
        raise OSError("the power is cut")

    monkeypatch.setattr("tasks.commit_step.sync_folder", fail_once_synced)
    assert run(config).is_failed()
    folder, adapter = run_folder("r") / "steps/000001", run_folder("r") / "adapters/000001"
    assert synced == [adapter] and not (run_folder("r") / "steps/000000/manifest.json").exists()
    assert not is_at_work() and (folder / "samples.parquet").exists()
    sampled_at = (folder / "samples.parquet").stat().st_mtime_ns
    made = {path.relative_to(adapter): path.read_bytes() for path in adapter.rglob("*.safetensors")}
    (adapter / "state/exp_avg.safetensors").write_bytes(b"\0" * 4096)
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "tasks.train"):
        assert run(config).result().num_steps == NUM_STEPS
    assert "not all of it is there (state/exp_avg.safetensors): training again" in caplog.text
    assert {path.relative_to(adapter): path.read_bytes() for path in adapter.rglob("*.safetensors")} == made
    assert (folder / "samples.parquet").stat().st_mtime_ns == sampled_at, "sampled again"
