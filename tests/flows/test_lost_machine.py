"""A machine that is lost in the middle of a rollout: another one goes on from the store, with the samples that were done."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from flows.run import rl_run
from infra.config import EvaluationConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.mirror.fetching import fetch
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import RunFolder, StepFolder

NUM_STEPS = 2
TAKEN_OF_THE_LAST = 5
IS_KILLED = 9
KILLED = f"""
import os, sys, time
from pathlib import Path
from flows.run import rl_run
from infra.config import RunConfig
from infra.engines.rollout_collector import RolloutCollector
from infra.settings import settings

config = RunConfig.model_validate_json(sys.stdin.read())
num_samples = config.data.num_prompts * config.sampling.group_size
index = Path(settings().store_url) / config.name / "under-way/index.json"
taken, take = [], RolloutCollector.take

def take_and_die(rollout, sample):
    is_more_needed = take(rollout, sample)
    taken.append(sample)
    if len(taken) == num_samples + {TAKEN_OF_THE_LAST}:
        copied_at, deadline = time.time(), time.monotonic() + 120
        while time.monotonic() < deadline and not (index.exists() and index.stat().st_mtime > copied_at + 1.5):
            time.sleep(0.1)
        os._exit({IS_KILLED})
    return is_more_needed

RolloutCollector.take = take_and_die
rl_run.with_options(result_storage=settings().results)(config)
"""
"""A run that is killed in the rollout of step 1, when the store has a copy that began after the last sample."""

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900), pytest.mark.full]


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    return scripted.but(num_steps=NUM_STEPS, evaluation=EvaluationConfig(every=0))


def digests(run: str) -> list[str]:
    return [read_json(StepFolder.at(run, step).report)["adapter"]["weights"]["sha256"] for step in range(NUM_STEPS)]


def test_another_machine_samples_only_what_the_last_copy_lacks_and_makes_equal_adapters(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_run.with_options(result_storage=settings().results)(config)
    undisturbed, store = digests(config.name), str(tmp_path / "shared")
    lost = config.but(name="lost")
    environment = {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "RATCHET_WORKSPACE": str(settings().workspace),
        "RATCHET_STORE_URL": store,
        "RATCHET_STORE_EVERY_S": "1",
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], input=lost.model_dump_json(), text=True, env=os.environ | environment, timeout=400
    )
    assert killed.returncode == IS_KILLED
    assert not StepFolder.at("lost", 1).manifest.exists()
    ScriptedEngine.stop_in(settings().workspace)
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path / "other"))
    settings.cache_clear()
    fetch(f"{store}/lost")
    assert StepFolder.at("lost", 1).journal.exists()
    is_first_copied = StepFolder.at("lost", 0).manifest.exists()  # else its finished rollout was
    assert is_first_copied or StepFolder.at("lost", 0).samples.exists()
    sample, made = ScriptedEngine.sample, list[int]()

    def noted(engine: ScriptedEngine, missing: Any, *given: Any, **how: Any) -> Any:
        made.append(len(missing))
        return sample(engine, missing, *given, **how)

    monkeypatch.setattr(ScriptedEngine, "sample", noted)
    rl_run.with_options(result_storage=settings().results)(lost)
    num_samples = config.data.num_prompts * config.sampling.group_size
    assert made == [num_samples - TAKEN_OF_THE_LAST], "step 1 alone, and only what the copy lacks"
    assert digests("lost") == undisturbed
    assert RunFolder.of("lost").fetched_from.exists()
