"""Episodes over several steps: rollouts that wait for theirs, and episodes that one step stops and the next goes on with. A real trainer, a scripted
engine, a user's environment in worker processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from flows.replay import replay_step
from flows.run import rl_run
from infra.config import EnvironmentConfig, EvaluationConfig, RunConfig
from infra.rewards import client
from infra.runs.accounting import unused
from infra.runs.manifest import Manifest, read_manifest
from infra.settings import settings
from infra.store.files import path_of, read_json
from infra.store.layout import StepFolder, run_folder
from infra.store.samples import read_samples, trajectory_of

NUM_STEPS, NUM_AHEAD, NUM_TURNS = 3, 2, 2
NUM_EPISODES = 8
"""Of a rollout."""
TAKEN_OF_THE_LAST = 5
"""Turns."""
IS_KILLED = 9
GAME = """
import os, time
HERE = os.path.dirname(os.path.abspath(__file__))

class Game:
    def reset(self, task):
        with open(HERE + "/resets", "a") as stream:
            stream.write("x")
            self.is_first = stream.tell() == 1
        self.turn = 0
        return task["question"]

    def step(self, action):
        self.turn += 1
        if self.is_first and self.turn == 1 and os.path.exists(HERE + "/slow"):
            time.sleep(50)
        return "%d letters" % len(action), len(action) % 7 / 7, self.turn == 2
"""
KILLED = f"""
import os, sys
from flows.run import rl_run
from infra.config import RunConfig
from infra.gateway.session.records import TurnJournal
from infra.settings import settings

taken, add = [], TurnJournal.add

def add_or_die(journal, record):
    add(journal, record)
    taken.append(record)
    if len(taken) == {2 * NUM_EPISODES * NUM_TURNS + TAKEN_OF_THE_LAST}:
        os._exit({IS_KILLED})

TurnJournal.add = add_or_die
rl_run.with_options(result_storage=settings().results)(RunConfig.model_validate_json(sys.stdin.read()))
"""
"""A run that is killed in its third rollout, that of step 2, while step 0 trains and the rollout of step 1 waits."""

pytestmark = [pytest.mark.usefixtures("prefect_server", "ends_programs"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, tmp_path: Path) -> RunConfig:
    (tmp_path / "game.py").write_text(GAME)
    environment = EnvironmentConfig.model_validate({"name": f"{tmp_path / 'game.py'}:Game", "workers": 2})
    return scripted.but(
        num_steps=NUM_STEPS,
        trainer=scripted.trainer.but(mode="persistent"),
        sampling=scripted.sampling.but(group_size=2),
        environment=environment,
        evaluation=EvaluationConfig(every=0),
    )


def corrected(config: RunConfig, max_staleness: int) -> RunConfig:
    correction = {"mode": "decoupled", "kind": "tis", "max_staleness": max_staleness}
    loss = config.trainer.loss.but(correction=correction)
    return config.but(trainer=config.trainer.but(loss=loss))


def run(config: RunConfig) -> Any:
    made = rl_run.with_options(result_storage=settings().results)(config)
    client.close_all()
    return made


def made(step: int, run: str = "r") -> Manifest:
    return read_manifest(run_folder(run) / f"steps/{step:06d}")


def metrics(step: int) -> dict[str, float]:
    found: dict[str, float] = read_json(run_folder("r") / f"steps/{step:06d}/report.json")["metrics"]
    return found


def adapters(run: str) -> list[str]:
    return [made(step, run).adapter_out.sha256 for step in range(NUM_STEPS)]


def test_a_run_of_episodes_that_is_killed_with_rollouts_waiting_trains_each_group_once(config: RunConfig) -> None:
    ahead = corrected(config, NUM_AHEAD)
    assert run(ahead).num_steps == NUM_STEPS
    assert [metrics(step)["rollout/age"] for step in range(NUM_STEPS)] == [0, 1, 2]
    assert "mismatch/weight_mean" in metrics(2), "what is older is corrected for"
    trained = [sample for step in range(NUM_STEPS) for sample in read_samples(StepFolder.at("r", step).samples)]
    assert [sample.prompt_id for sample in trained] == sorted([*range(NUM_STEPS * config.data.num_prompts)] * 2)
    on_policy = corrected(config, 0).but(name="on-policy", num_steps=1)
    run(on_policy)
    ours, theirs = made(0), made(0, "on-policy")
    assert (ours.rollouts.file.sha256, ours.adapter_out.sha256) == (theirs.rollouts.file.sha256, theirs.adapter_out.sha256)
    begun = ahead.but(name="killed")
    environment = {"PREFECT_API_URL": PREFECT_API_URL.value(), "RATCHET_WORKSPACE": str(settings().workspace)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], input=begun.model_dump_json(), text=True, env=os.environ | environment
    )
    assert killed.returncode == IS_KILLED
    waiting = StepFolder.at("killed", 1).samples
    made_at = waiting.stat().st_mtime_ns
    assert not StepFolder.at("killed", 0).manifest.exists() and not StepFolder.at("killed", 2).samples.exists()
    report = run(begun)
    assert report.num_steps == NUM_STEPS and report.unused.line == ""
    assert waiting.stat().st_mtime_ns == made_at, "played again"
    measures = read_json(StepFolder.at("killed", 2).path / "measures/roll_out.json")
    assert measures["num_kept_turns"] + NUM_TURNS * measures["num_kept"] == TAKEN_OF_THE_LAST
    assert adapters("killed") == adapters("r")


@pytest.mark.full  # tests/tasks/test_carried_episodes.py is its sample
def test_an_episode_that_a_step_stops_is_trained_in_the_next_with_both_adapters(config: RunConfig, tmp_path: Path) -> None:
    partial = corrected(config, 0)
    partial = partial.but(
        num_steps=2,
        data=partial.data.but(num_oversampled_prompts=1, partial_rollouts=True),
        engine=partial.engine.but(deterministic=False),
    )
    (tmp_path / "slow").touch()
    report = run(partial)
    before, after = made(0), made(1)
    left = before.rollouts.left_over
    assert left is not None and after.prompts.begun == left.samples and after.prompts.num_begun_prompts == 1
    samples = [sample for sample in read_samples(path_of(after.rollouts.file)) if sample.prompt_id in left.prompt_ids]
    turns = [[s.adapter_sha256 for s in trajectory_of(sample).segments if s.is_sampled] for sample in samples]
    old, new = before.adapter_in.sha256, after.adapter_in.sha256
    assert [old, new] in turns and all(digests in ([old, new], [old, old]) for digests in turns), "one was stopped in its turn 1"
    assert after.rollouts.num_older_tokens == sum(sample.num_older_tokens for sample in samples) > 0
    assert metrics(1)["rollout/age"] == metrics(1)["rollout/older_tokens_frac"] > 0
    assert metrics(1)["episodes/carried_turns"] >= 1 and "mismatch/weight_mean" in metrics(1)
    taken = [sorted({sample.prompt_id for sample in read_samples(path_of(made(step).rollouts.file))}) for step in (0, 1)]
    assert not set(taken[0]) & set(taken[1]) and len(taken[0]) == len(taken[1]) == 4
    assert report.unused.num_dropped == 0, "what was begun is trained on, or carried over"
    assert report.unused.num_carried_over == unused.of_run("r").num_carried_over
    replay = replay_step.with_options(result_storage=settings().results)
    with pytest.raises(ValueError, match=r"goes on with 1 groups that the step before has begun .* replay it from score"):
        replay("r", 1, "again", "roll_out")
    assert replay("r", 1, "again", "score").adapter.sha256 == after.adapter_out.sha256
