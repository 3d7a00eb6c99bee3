"""The whole flow in this process: a real trainer, a scripted engine, and a model with random weights."""

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import temporary_settings
from prefect.states import State

from flows.cli.session import results_settings
from flows.step import rl_step
from infra.colocation import plans
from infra.config import RunConfig
from infra.data import prompts
from infra.engines.interface import WrongAnswer
from infra.engines.scripted import ScriptedEngine
from infra.failures import TrainingFailed
from infra.models import base_model
from infra.records import StepReport
from infra.settings import settings
from infra.store.files import DigestMismatch, read_json
from infra.store.layout import adapter_folder, run_folder
from infra.store.samples import Sample

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]

score = sys.modules["tasks.score"]  # the module: its task has the same name
DEADLINE_S = 60.0
SAMPLED, SCORED = "steps/000000/samples.parquet", "steps/000000/scored.parquet"


def remove_step() -> None:
    shutil.rmtree(run_folder("r") / "steps/000000")


def remove_run() -> None:
    shutil.rmtree(run_folder("r"))


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    return scripted


def run(config: RunConfig, step: int | None = None) -> State[StepReport]:
    """With results where our commands have Prefect store them: in this test's workspace."""
    with temporary_settings(results_settings()):
        return rl_step(config, step, return_state=True)


def made_at(*names: str) -> list[float]:
    return [os.stat(run_folder("r") / name).st_mtime_ns for name in names]


def test_a_step_that_failed_in_training_goes_on_there_and_the_next_one_follows(config: RunConfig) -> None:
    hasty = config.but(trainer=config.trainer.but(timeout_s=0.05))
    failed = run(hasty)
    assert failed.is_failed()
    assert "was ended after 0.05 s" in (failed.message or "")
    before = made_at(SAMPLED, SCORED)
    first = run(config).result()
    assert first.adapter.version == 1
    assert made_at(SAMPLED, SCORED) == before, "sampled or scored again"
    second = run(config).result()
    assert (second.step, second.adapter.version) == (1, 2)


def test_a_step_whose_files_were_damaged_between_two_attempts_is_not_committed_until_they_are_whole(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise RuntimeError("stopped before the commit")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["flows.step"], "commit_step", stopped)
        assert "stopped before the commit" in (run(config).message or "")
    for name in ("steps/000000/prompts.jsonl", SAMPLED, SCORED, "steps/000000/batch.safetensors"):
        path = run_folder("r") / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DigestMismatch, match=f"{path} has changed since it was written"):
            run(config).result()
        assert not (run_folder("r") / "steps/000000/manifest.json").exists()
        path.write_bytes(whole)
    assert run(config).result().adapter.version == 1


def test_a_step_is_checked_once_and_its_colocation_resolved_once(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    counted = [(base_model, "check_supported"), (prompts, "check_repeats"), (plans, "plan"), (plans, "resolve_colocation")]
    for module, name in counted:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, name=name, function=function, **how: calls.append(name) or function(*given, **how)
        )
    monkeypatch.setattr(sys.modules["flows.step"], "resolve_colocation", plans.resolve_colocation)
    early: list[tuple[int, bool]] = []
    start = lambda trainer, adapter: early.append((adapter.version, (run_folder("r") / SAMPLED).exists()))  # noqa: E731
    monkeypatch.setattr(sys.modules["flows.step"], "start_early", start)
    run(config).result()
    made = {name: calls.count(name) for _, name in counted}
    assert made == {"check_supported": 1, "check_repeats": 1, "plan": 2, "resolve_colocation": 1}, (
        "plan: by the check, and resolved"
    )
    assert early == [(0, False)], "a trainer may start before the samples are there"


def test_an_engine_that_dies_in_the_middle_of_a_rollout_costs_the_step_nothing_but_time(
    config: RunConfig, workspace: Path
) -> None:
    (workspace / "fault").write_text("dies once")
    made = run(config).result()
    assert made.metrics["rollout/kept_samples"] == 1
    disturbed = made.adapter.sha256
    remove_run()
    undisturbed = run(config).result()
    assert undisturbed.metrics["rollout/kept_samples"] == 0
    assert undisturbed.adapter.sha256 == disturbed


def test_a_replica_that_dies_in_the_middle_of_a_rollout_is_named_in_the_step_and_changes_no_sample(
    config: RunConfig, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = run(config).result()
    assert "rollout/lost_replicas" not in undisturbed.metrics
    remove_run()
    (workspace / "fault").write_text("dies once")
    made = run(config.but(engine=config.engine.but(replicas=2))).result()
    assert (made.metrics["rollout/lost_replicas"], made.metrics["rollout/kept_samples"]) == (1, 0)
    assert made.metrics["rollout/moved_samples"] > 0 and "replica lost" in caplog.text
    assert made.adapter.sha256 == undisturbed.adapter.sha256


def test_samples_of_another_model_make_no_adapter_and_are_sampled_anew_where_their_step_is_removed(config: RunConfig) -> None:
    """The scripted engine's log-probabilities are none of this model's."""
    strict = config.but(trainer=config.trainer.but(max_mismatch=0.5))
    for _ in range(2):
        with pytest.raises(TrainingFailed, match=r"more than trainer\.max_mismatch 0\.5"):
            run(strict).result()
        assert not adapter_folder("r", 1).exists()
    sampled_at = made_at(SAMPLED)
    remove_step()
    with pytest.raises(TrainingFailed):
        run(strict).result()
    assert made_at(SAMPLED) != sampled_at
    assert run(config).result().adapter.version == 1


def test_a_step_that_failed_after_training_does_not_train_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(engine: ScriptedEngine, adapter: object) -> None:
        raise WrongAnswer("the adapter is not there")

    with monkeypatch.context() as patch:
        served = ScriptedEngine.load_adapter
        patch.setattr(
            ScriptedEngine,
            "load_adapter",
            lambda engine, adapter: (served if adapter.version == 0 else forgetful)(engine, adapter),
        )
        assert run(config).is_failed()
    assert not (run_folder("r") / "steps/000000/manifest.json").exists()
    before = made_at("adapters/000001/adapter_model.safetensors", "steps/000000/train/trainer.log")
    shutil.rmtree(settings().results)  # even where Prefect has forgotten the result
    (run_folder("r") / "steps/000000/measures/train.json").unlink()  # and where we died before we said how long it took
    report = run(config).result()
    assert made_at("adapters/000001/adapter_model.safetensors", "steps/000000/train/trainer.log") == before
    assert read_json(run_folder("r") / "steps/000000/manifest.json")["adapter_out"]["weights"]["sha256"] == report.adapter.sha256


def test_the_engine_makes_room_while_its_samples_are_scored_and_a_release_that_fails_fails_the_step(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases, scores, judged = threading.Event(), threading.Event(), score.judged

    def release(engine: ScriptedEngine) -> None:
        releases.set()
        assert scores.wait(DEADLINE_S)
        raise WrongAnswer("the driver counts as much as before")

    def reward(*arguments: Any, **work: Any) -> list[Sample]:
        scores.set()
        assert releases.wait(DEADLINE_S)
        return judged(*arguments, **work)

    monkeypatch.setattr(ScriptedEngine, "release_memory", release)
    monkeypatch.setattr(score, "judged", reward)
    state = run(config)
    assert state.is_failed() and "the driver counts as much as before" in (state.message or "")
    assert (run_folder("r") / SCORED).exists()
    assert not (run_folder("r") / "steps/000000/train").exists(), "nobody trains before there is room"


def test_a_run_that_was_removed_and_begun_again_finds_nothing_in_the_cache_and_makes_the_same_adapter(config: RunConfig) -> None:
    first = run(config).result()
    remove_run()
    again = run(config).result()
    assert again.adapter.sha256 == first.adapter.sha256


def test_a_step_that_is_not_the_next_is_refused(config: RunConfig) -> None:
    state = run(config, step=3)
    assert state.is_failed()
    assert "the next is 0" in (state.message or "")


def test_several_optimizer_steps_with_a_penalty_in_the_reward_go_through_the_whole_flow(config: RunConfig) -> None:
    loss = {"kl": {"coefficient": 0.01, "where": "reward"}, "correction": {"mode": "decoupled", "kind": "icepop"}}
    schedule = {"lr_scheduler_type": "cosine", "num_schedule_steps": 4}
    shaped = config.but(
        batch={"advantage": "reinforce_pp", "overlong": {"buffer_tokens": 8, "max_output_tokens": 16}},
        trainer=config.trainer.but(loss=loss, num_minibatches=2, **schedule),
    )
    made = run(shaped).result()
    assert (made.adapter.version, made.adapter.num_optimizer_steps) == (1, 2)
    assert 0 < made.metrics["train/learning_rate"] < shaped.trainer.learning_rate
    assert {"train/kl_ref", "mismatch/out_of_band_frac"} <= made.metrics.keys()
