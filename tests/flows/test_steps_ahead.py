"""Several steps off-policy: rollouts of later steps wait in their folders. A real trainer, a scripted engine."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.states import State

from flows.run import rl_run
from infra.config import EvaluationConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.eval_records import RunReport
from infra.failures import EngineUnavailable
from infra.runs.accounting import unused
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import StepFolder, run_folder
from infra.store.samples import read_samples

NUM_STEPS, NUM_AHEAD = 4, 2
NUM_SAMPLES = 16
"""Of a rollout."""
TAKEN_OF_THE_LAST = 5
IS_KILLED = 9
KILLED = """
import os, sys
from flows.run import rl_run
from infra.config import RunConfig
from infra.engines.rollout_collector import RolloutCollector
from infra.settings import settings

taken, take = [], RolloutCollector.take

def take_or_die(rollout, sample):
    is_more_needed = take(rollout, sample)
    taken.append(sample)
    if len(taken) == int(sys.argv[1]):
        os._exit(int(sys.argv[2]))
    return is_more_needed

RolloutCollector.take = take_or_die
rl_run.with_options(result_storage=settings().results)(RunConfig.model_validate_json(sys.stdin.read()))
"""
"""The program of a run that is killed once a given number of samples is on record."""

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    loss = scripted.trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_staleness": NUM_AHEAD})
    trainer = scripted.trainer.but(mode="persistent", loss=loss)
    return scripted.but(num_steps=NUM_STEPS, trainer=trainer, evaluation=EvaluationConfig(every=0))


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each rollout: the adapter's version and the number of samples."""
    sample, made, at_work = ScriptedEngine.sample, [], threading.Lock()

    def noted(engine: ScriptedEngine, missing: Any, sampling: Any, adapter: Any, *given: Any, **how: Any) -> Any:
        assert at_work.acquire(blocking=False), "two rollouts at a time"
        try:
            made.append((adapter.version, len(missing)))
            return sample(engine, missing, sampling, adapter, *given, **how)
        finally:
            at_work.release()

    monkeypatch.setattr(ScriptedEngine, "sample", noted)
    return made


def run(config: RunConfig) -> State[RunReport]:
    return rl_run.with_options(result_storage=settings().results)(config, return_state=True)


def kill(config: RunConfig, num_taken: int) -> None:
    """Run it in a process of its own, which is killed after the given number of samples."""
    environment = {"PREFECT_API_URL": PREFECT_API_URL.value(), "RATCHET_WORKSPACE": str(settings().workspace)}
    command = [sys.executable, "-c", KILLED, str(num_taken), str(IS_KILLED)]
    assert (
        subprocess.run(command, input=config.model_dump_json(), text=True, env=os.environ | environment).returncode == IS_KILLED
    )


def of_each_step(name: str, run: str = "r") -> list[Any]:
    return [read_json(run_folder(run) / f"steps/{step:06d}/{name}.json") for step in range(NUM_STEPS)]


def metric_of_each_step(name: str) -> list[float]:
    return [report["metrics"][name] for report in of_each_step("report")]


def samples_of(run: str, step: int) -> Path:
    return StepFolder.at(run, step).samples


def digests(run: str) -> list[str]:
    return [report["adapter"]["weights"]["sha256"] for report in of_each_step("report", run)]


def test_a_run_that_is_killed_with_groups_waiting_loses_none_of_them_and_makes_none_twice(
    config: RunConfig, rollouts: list[tuple[int, int]]
) -> None:
    assert run(config).result().num_steps == NUM_STEPS
    assert rollouts == [(0, NUM_SAMPLES), (0, NUM_SAMPLES), (0, NUM_SAMPLES), (1, NUM_SAMPLES)]
    assert metric_of_each_step("rollout/age") == [0, 1, 2, 2]
    ahead = metric_of_each_step("rollout/steps_ahead")
    assert max(ahead) <= NUM_AHEAD and ahead[-1] == 0, "there is no step after the last"
    prompts = [sample.prompt_id for step in range(NUM_STEPS) for sample in read_samples(samples_of("r", step))]
    assert sorted(prompts) == sorted([*range(NUM_STEPS * config.data.num_prompts)] * config.sampling.group_size)
    rollouts.clear()
    begun = config.but(name="killed")
    kill(
        begun, 2 * NUM_SAMPLES + TAKEN_OF_THE_LAST
    )  # in its third rollout, that of step 2: step 0 trains, the rollout of step 1 waits
    waiting = samples_of("killed", 1)
    made_at = waiting.stat().st_mtime_ns
    assert not StepFolder.at("killed", 0).manifest.exists() and not samples_of("killed", 2).exists()
    assert unused.of_run("killed").num_waiting == 2 * NUM_SAMPLES + TAKEN_OF_THE_LAST, "steps 0 and 1, and a part of step 2"
    made = run(begun).result()
    assert made.num_steps == NUM_STEPS and made.unused.line == ""
    assert rollouts == [(0, NUM_SAMPLES - TAKEN_OF_THE_LAST), (1, NUM_SAMPLES)]
    assert waiting.stat().st_mtime_ns == made_at
    assert digests("killed") == digests("r")


@pytest.mark.full  # tests/tasks/test_in_flight.py has the rollout alone, killed at each of its samples
@pytest.mark.parametrize("num_taken", [NUM_SAMPLES + TAKEN_OF_THE_LAST, 2 * NUM_SAMPLES + TAKEN_OF_THE_LAST])
def test_a_run_with_in_flight_updates_that_is_killed_makes_the_same_adapters(config: RunConfig, num_taken: int) -> None:
    """Before the switch of step 1's rollout to adapter 1, and after it."""
    loss = config.trainer.loss.but(correction={"mode": "decoupled", "kind": "tis", "max_staleness": 1, "in_flight_updates": True})
    config = config.but(sampling=config.sampling.but(max_output_tokens=4), trainer=config.trainer.but(loss=loss))
    assert run(config).result().num_steps == NUM_STEPS
    samples = [read_samples(samples_of("r", step)) for step in range(NUM_STEPS)]
    assert [{each.adapter_version for each in found} for found in samples] == [{0}, {1}, {2}, {3}]
    assert [{each.num_older_tokens for each in found} for found in samples] == [{0}, {2}, {2}, {2}]
    assert [report["metrics"].get("rollout/two_adapters_frac") for report in of_each_step("report")] == [None, 1, 1, 1]
    begun = config.but(name="killed")
    kill(begun, num_taken)
    made = run(begun).result()
    assert made.num_steps == NUM_STEPS and made.unused.line == ""
    assert digests("killed") == digests("r")


def test_rollouts_behind_one_that_fails_wait_until_its_step_has_made_it(
    config: RunConfig, rollouts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, calls = ScriptedEngine.sample, []

    def away_at_its_second_rollout(engine: ScriptedEngine, *given: Any, **how: Any) -> Any:
        calls.append(threading.current_thread() is threading.main_thread())
        if len(calls) == 2:
            raise EngineUnavailable("it is away")
        return sample(engine, *given, **how)

    monkeypatch.setattr(ScriptedEngine, "sample", away_at_its_second_rollout)
    assert run(config).result().num_steps == NUM_STEPS
    assert calls == [True, False, True, False, False], "its step made it, then the queue went on"
    assert rollouts == [(0, NUM_SAMPLES)] * 3 + [(1, NUM_SAMPLES)]


def test_an_evaluation_has_the_engine_for_itself(
    config: RunConfig, rollouts: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "infra.concurrency.prefetch"):
        assert run(config.but(evaluation=EvaluationConfig(every=1, num_prompts=4))).result().num_steps == NUM_STEPS
    assert [version for version, size in rollouts if size == NUM_SAMPLES] == [0, 0, 0, 1]
    assert not [record for record in caplog.records if record.name == "infra.concurrency.prefetch"]
