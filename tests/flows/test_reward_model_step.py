"""A step whose samples a reward model scores: killed -9 while it scores, and replayed.

As in test_run_killed.py, each process starts a Prefect server of its own.
"""

import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from killed_steps import digests, finished
from reward_models import made
from shared import program_with

from flows import drawing
from infra.config import EvaluationConfig, RunConfig
from infra.records import AdapterVersion
from infra.store.files import read_json_lines
from infra.store.samples import read_samples

pytestmark = pytest.mark.timeout(1800)

PROGRAM = """
import os, pathlib, signal, sys
from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
from infra.rewards.scores import ScoreJournal

num_to_live, add = int(sys.argv[2]), ScoreJournal.add

def counted(*outcome):
    global num_to_live
    add(*outcome)
    with open(os.environ["RATCHET_WORKSPACE"] + "/scored", "a") as file:
        file.write("1\\n")
    num_to_live -= 1
    if not num_to_live:
        os.kill(os.getpid(), signal.SIGKILL)

ScoreJournal.add = counted
rl_step(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()))
for number, first in enumerate(sys.argv[3:]):
    replay_step("r", 0, f"again-{number}", first)
"""


def config_of(scripted: RunConfig, folder: Path) -> RunConfig:
    model = {"path": str(folder), "max_tokens": 200, "max_tokens_per_batch": 400}
    return scripted.but(
        num_steps=1,
        evaluation=EvaluationConfig(every=0),
        reward={"name": "reward_model", "model": model, "max_unjudged_frac": 0.0},
    )


def num_scored(workspace: Path) -> int:
    return len(read_json_lines(workspace / "scored"))


def check_scored(workspace: Path, replay: str) -> Path:
    """The samples have different scores, and the replay has the step's digests. Return the step's folder."""
    step = workspace / "runs/r/steps/000000"
    assert len({each.reward for each in read_samples(step / "scored.parquet")}) > 8
    assert digests(workspace / f"runs/{replay}/steps/000000") == digests(step)
    return step


def test_the_engine_makes_room_before_a_reward_model_is_loaded(scripted: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(drawing, "release_memory", lambda *inputs: seen.append("released"))
    monkeypatch.setattr(drawing, "in_background", lambda *inputs: nullcontext())  # it may be done at once, or late
    reward = config_of(scripted, Path("model")).reward
    with drawing.released(scripted.engine, reward, AdapterVersion.model_construct()):
        assert seen == ["released"]


def test_a_step_is_scored_and_replayed_by_the_same_reward_model(scripted: RunConfig, tmp_path: Path) -> None:
    folder = made("qwen2", tmp_path / "model", max_position_embeddings=512)
    finished(config_of(scripted, folder), tmp_path, PROGRAM, "score")
    check_scored(tmp_path, "again-0")


@pytest.mark.full
def test_a_step_that_is_killed_while_its_reward_model_scores_has_the_undisturbed_digests(
    scripted: RunConfig, tmp_path: Path
) -> None:
    config = config_of(scripted, made("llama", tmp_path / "model", max_position_embeddings=512))
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    finished(config, undisturbed, PROGRAM, "draw_prompts")
    step = check_scored(undisturbed, "again-0")

    killed = program_with(config, disturbed, PROGRAM, "6")
    assert killed.wait(timeout=900) == -signal.SIGKILL, (disturbed / "said.log").read_text()[-4000:]
    finished(config, disturbed, PROGRAM)
    assert num_scored(disturbed) == 16, "no score was made twice"
    assert digests(disturbed / "runs/r/steps/000000") == digests(step)
