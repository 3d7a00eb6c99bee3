"""One step off-policy: the next step's samples are drawn while this one trains. A real trainer, a scripted engine."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect.states import State

from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.megatron.protocol.job import TrainJob
from infra.records import StepReport
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import run_folder
from tasks import commit_step

VERBS = [f"time/{verb}_s" for verb in commit_step.VERBS]

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    trainer = scripted.trainer
    loss = trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1})
    return scripted.but(num_steps=3, trainer=trainer.but(loss=loss, mode="persistent"))


def run(config: RunConfig) -> State[StepReport]:
    return rl_step.with_options(result_storage=settings().results)(config, return_state=True)


def step_files(step: int) -> Path:
    return run_folder("r") / f"steps/{step:06d}"


def sampled_at(step: int) -> int:
    return (step_files(step) / "samples.parquet").stat().st_mtime_ns


def manifest(step: int) -> dict[str, Any]:
    found = read_json(step_files(step) / "manifest.json")
    assert isinstance(found, dict)
    return found


def test_each_step_trains_on_what_the_adapter_before_it_sampled_while_that_step_trained(config: RunConfig) -> None:
    made = [run(config).result()]
    before = sampled_at(1)
    made.append(run(config).result())
    assert sampled_at(1) == before, "sampled again"
    digest = read_json(step_files(2) / "samples.inputs_key.json")
    shutil.rmtree(step_files(2))  # what was sampled ahead is lost, and sampled again by the same adapter
    made.append(run(config).result())
    assert read_json(step_files(2) / "samples.inputs_key.json") == digest
    assert not step_files(3).exists(), "there is no fourth step"
    assert [each.metrics["rollout/age"] for each in made] == [0, 1, 1]
    assert made[1].metrics["time/step_s"] - made[1].metrics["time/overhead_s"] < sum(
        s for name, s in made[1].metrics.items() if name in VERBS
    )
    assert [manifest(step)["rollouts"]["adapter_version"] for step in range(3)] == [0, 0, 1]
    job = TrainJob.model_validate(read_json(step_files(2) / "train/job.json"))
    sampler = manifest(1)["adapter_in"]["weights"]["sha256"]
    assert (job.adapter_version, job.sampler_version, job.sampler_sha256) == (2, 1, sampler)


def test_a_rollout_ahead_that_fails_is_left_to_the_next_step(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample, calls = ScriptedEngine.sample, []

    def away_at_its_second_rollout(engine: ScriptedEngine, *given: Any, **how: Any) -> Any:
        calls.append(engine)
        if len(calls) == 2:
            raise RuntimeError("the engine is away")
        return sample(engine, *given, **how)

    monkeypatch.setattr(ScriptedEngine, "sample", away_at_its_second_rollout)
    with caplog.at_level(logging.WARNING, "infra.concurrency.prefetch"):
        assert run(config).result().adapter.version == 1
    assert f"{step_files(1)} failed, its task will do what is missing: RuntimeError: the engine is away" in caplog.text
    made = run(config).result()
    assert (made.adapter.version, made.metrics["rollout/age"]) == (2, 1)


def test_a_training_that_fails_loses_nothing_of_the_rollout_ahead(config: RunConfig) -> None:
    assert run(config.but(trainer=config.trainer.but(timeout_s=0.05))).is_failed()
    before = sampled_at(1)
    assert run(config).result().adapter.version == 1
    assert sampled_at(1) == before


def test_a_step_of_older_samples_is_replayed_from_its_rewards_on_and_not_from_its_rollout(config: RunConfig) -> None:
    first, second = run(config).result(), run(config).result()
    assert first.step + 1 == second.step == 1
    replay = replay_step.with_options(result_storage=settings().results)
    with pytest.raises(ValueError, match=r"was sampled by adapter 0 .* replay it from score, assemble or train"):
        replay("r", 1, "again", "roll_out")
    assert not run_folder("again").exists()
    again = replay("r", 1, "again", "score")
    assert again.adapter.sha256 == second.adapter.sha256
    following = run(config.but(name="again")).result()
    assert (following.step, following.metrics["rollout/age"]) == (2, 1)
    assert following.adapter.sha256 == run(config).result().adapter.sha256
