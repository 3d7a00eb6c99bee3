"""A run with a reward in a user's file: made and resumed in processes of other folders, evaluated, replayed, and scored again after a change."""

from pathlib import Path
from typing import Any

import pytest
from shared import last_states, step_in

from flows.evaluate import evaluate
from flows.replay import replay_step
from infra.config import RewardConfig, RunConfig
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import run_folder
from infra.store.samples import read_samples

pytestmark = [pytest.mark.usefixtures("prefect_server", "ends_programs"), pytest.mark.timeout(1800)]

REWARD = "import helper\ndef score(*, question, completion, answer):\n    return helper.weight() * len(completion) % 7\n"


@pytest.fixture
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user's with a reward and a module beside it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(REWARD)
    (folder / "helper.py").write_text("def weight():\n    return 1.0\n")
    return folder


@pytest.fixture
def config(scripted: RunConfig, workspace: Path, user: Path) -> RunConfig:
    asked = scripted.evaluation.but(every=1, num_prompts=4, pass_reward=3.0)
    return scripted.but(reward=RewardConfig(name=f"{user}/mine.py:score"), evaluation=asked)


def in_process(flow: Any, *arguments: Any) -> Any:  # Any: a flow, and what it takes and gives
    return flow.with_options(result_storage=settings().results)(*arguments)


def rewards_of(run: str) -> set[float | None]:
    return {sample.reward for sample in read_samples(run_folder(run) / "steps/000000/scored.parquet")}


def test_a_reward_in_a_file_holds_in_other_processes_and_a_change_beside_it_is_scored_again(
    config: RunConfig, user: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = tmp_path_factory.mktemp("places")
    broken = step_in(places / "first", config.but(trainer=config.trainer.but(timeout_s=0.05)))
    assert broken.returncode == 1 and last_states()["score"] == "Completed", broken.stdout + broken.stderr
    assert rewards_of("r") <= set(map(float, range(7)))
    (user / "helper.py").write_text("def weight():\n    return 2.5\n")
    resumed = step_in(places / "second", config)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    states = last_states()
    assert (states["roll_out"], states["score"], states["train"]) == ("Cached", "Completed", "Completed")
    assert any(reward is not None and reward % 1 for reward in rewards_of("r"))
    manifest = read_manifest(run_folder("r") / "steps/000000")
    assert manifest.config.reward.name == f"{user}/mine.py:score" and len(manifest.reward_source) == 64
    replayed = in_process(replay_step, "r", 0, "again", "score", [])
    assert replayed.adapter.sha256 == manifest.adapter_out.sha256
    assert all(row["equal"] for row in read_json(run_folder("again") / "steps/000000/replay.json")["digests"])
    assert read_manifest(run_folder("again") / "steps/000000").reward_source == manifest.reward_source
    [evaluation] = in_process(evaluate, config, 0).evaluations
    assert evaluation.mean_reward is not None and evaluation.num_prompts == 4
