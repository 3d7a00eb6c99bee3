"""A machine that is lost in the middle of a rollout: another one goes on from the store, with the samples that were done."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from judge_server import Reply, judge_server
from prefect.settings import PREFECT_API_URL

from flows.run import rl_run
from infra.config import EvaluationConfig, RewardConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.mirror.fetching import fetch
from infra.rewards.judges.ledger import Ledger
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import RunFolder, StepFolder

NUM_STEPS = 2
STILL_S = 3.0
"""So long nothing more has come."""
TAKEN_OF_THE_LAST = 5
TAKEN_OF_THE_LAST_JUDGED = 13
"""Of 16 in groups of 4: one group at least is complete."""
IS_KILLED = 9
KILLED = f"""
import json, os, sys, time
from contextlib import suppress
from pathlib import Path
from flows.run import rl_run
from infra.config import RunConfig
from infra.engines.rollout_collector import RolloutCollector
from infra.rewards.judges.ledger import Ledger
from infra.settings import settings

config = RunConfig.model_validate_json(sys.stdin.read())
num_samples = config.data.num_prompts * config.sampling.group_size
index = Path(settings().store_url) / config.name / "under-way/index.json"
journal = settings().workspace / "runs" / config.name / "steps/000001/samples.journal"
is_judged = config.reward.name == "rubric"
taken, take = [], RolloutCollector.take

def is_copied():
    with suppress(OSError, ValueError), Ledger() as ledger:
        sizes = {{file["path"].rpartition("/")[2]: file["num_bytes"] for file in json.loads(index.read_text())["files"]
                 if "steps/000001/" in file["path"]}}
        num_paid = len(ledger.paid(config.name, "step 1"))
        return sizes.get("samples.journal") == journal.stat().st_size and sizes.get("paid.jsonl", 0) == num_paid and num_paid >= is_judged

def take_and_die(rollout, sample):
    is_more_needed = take(rollout, sample)
    taken.append(sample)
    if len(taken) == num_samples + int(sys.argv[1]):
        deadline, since = time.monotonic() + 120, time.monotonic()
        while time.monotonic() < deadline and time.monotonic() < since + {STILL_S}:
            time.sleep(0.1)
            since = since if is_copied() else time.monotonic()
        os._exit({IS_KILLED})
    return is_more_needed

RolloutCollector.take = take_and_die
rl_run.with_options(result_storage=settings().results)(config)
"""
"""A run that is killed in the rollout of step 1, when the store has all samples that it should get, and what a judge was paid for them.

Its argument: number of samples of that step.
"""

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900), pytest.mark.full]


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    return scripted.but(num_steps=NUM_STEPS, evaluation=EvaluationConfig(every=0))


def digests(run: str) -> list[str]:
    return [read_json(StepFolder.at(run, step).report)["adapter"]["weights"]["sha256"] for step in range(NUM_STEPS)]


def kill(config: RunConfig, store: str, num_samples: int) -> None:
    """Make a run in this workspace until some samples of its last step are in the store."""
    environment = {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "RATCHET_WORKSPACE": str(settings().workspace),
        "RATCHET_STORE_URL": store,
        "RATCHET_STORE_EVERY_S": "1",
    }
    Path(store).mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(num_samples)],
        input=config.model_dump_json(),
        text=True,
        env=os.environ | environment,
        timeout=400,
    )
    assert killed.returncode == IS_KILLED


def be_in(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_WORKSPACE", str(workspace))
    settings.cache_clear()


def test_another_machine_samples_only_what_the_last_copy_lacks_and_makes_equal_adapters(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_run.with_options(result_storage=settings().results)(config)
    undisturbed, store = digests(config.name), str(tmp_path / "shared")
    lost = config.but(name="lost")
    kill(lost, store, TAKEN_OF_THE_LAST)
    assert not StepFolder.at("lost", 1).manifest.exists()
    ScriptedEngine.stop_in(settings().workspace)
    be_in(tmp_path / "other", monkeypatch)
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


def test_what_a_judge_was_paid_on_the_lost_machine_is_not_paid_again(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        return Reply(text=json.dumps({"reasoning": "because", "score": len(json.dumps(body)) % 10 / 10}))

    with judge_server(answer) as server:
        judge = {"base_url": server.url, "model": "judge-1", "rubric": "{question} <{completion}>"}
        judged = config.but(reward=RewardConfig.model_validate({"name": "rubric", "judge": judge}))
        rl_run.with_options(result_storage=settings().results)(judged)
        undisturbed, num_requests = digests(judged.name), len(server.bodies)
        ScriptedEngine.stop_in(settings().workspace)
        server.bodies.clear()

        be_in(tmp_path / "first", monkeypatch)
        lost, store = judged.but(name="lost"), str(tmp_path / "shared")
        kill(lost, store, TAKEN_OF_THE_LAST_JUDGED)
        ScriptedEngine.stop_in(settings().workspace)
        num_before = len(server.bodies)
        be_in(tmp_path / "other", monkeypatch)
        fetch(f"{store}/lost")
        rl_run.with_options(result_storage=settings().results)(lost)
        ScriptedEngine.stop_in(settings().workspace)
        assert num_requests // 2 < num_before < num_requests, "some of the last step were asked before"
        asked = Counter(json.dumps(body, sort_keys=True) for body in server.bodies)
        assert set(asked.values()) == {1} and len(asked) == num_requests
    assert digests("lost") == undisturbed
    with Ledger() as ledger:
        assert ledger.spent("lost").requests == num_requests, "the budget of the run counts them all"
