"""A step that draws until enough groups have different rewards: killed -9 in its second draw, and replayed.

As in test_run_killed.py, each process starts a Prefect server of its own.
"""

import os
import signal
from pathlib import Path

import pytest
from shared import becomes, program_with

from infra.config import EvaluationConfig, RunConfig
from infra.store.files import read_json, read_json_lines
from infra.store.samples import groups_of, read_samples

pytestmark = pytest.mark.timeout(1800)

PROGRAM = """
import pathlib, sys
from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
rl_step(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()))
if len(sys.argv) > 2:
    replay_step("r", 0, "again", sys.argv[2])
"""
A_THIRD_IS_USEFUL = """
import os, pathlib, time
root = pathlib.Path(os.environ["RATCHET_WORKSPACE"])
def score(*, question, sample_index):
    second = root / "runs/r/steps/000000/draws/02"
    while ((second / "samples.journal").exists() or (second / "samples.parquet").exists()) and not (root / "go").exists():
        time.sleep(0.05)
    return float(sample_index % 2) if sum(map(ord, question)) % 3 == 0 else 1.0
"""


@pytest.fixture
def config(scripted: RunConfig, tmp_path: Path) -> RunConfig:
    path = tmp_path / "mine.py"
    path.write_text(A_THIRD_IS_USEFUL)
    return scripted.but(
        num_steps=1,
        evaluation=EvaluationConfig(every=0),
        data=scripted.data.but(max_draws=6),
        reward={"name": f"{path}:score", "workers": 1, "timeout_s": 900.0, "environment": ["RATCHET_WORKSPACE"]},
    )


def finished(config: RunConfig, workspace: Path, *words: str) -> Path:
    """The folder of the committed step."""
    assert program_with(config, workspace, PROGRAM, *words).wait(timeout=900) == 0, (workspace / "said.log").read_text()[-4000:]
    return workspace / "runs/r/steps/000000"


def test_a_step_that_is_killed_in_its_second_draw_has_the_same_groups_and_samples_nothing_twice(
    config: RunConfig, tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "go").touch()
    step = finished(config, undisturbed, "draw_prompts")
    lines = read_json_lines(step / "draws.jsonl")
    kept = [line["prompt_id"] for line in lines if line["reason"] in ("useful", "fills up")]
    assert kept == [row["prompt_id"] for row in read_json_lines(step / "prompts.jsonl")]
    assert [group[0].prompt_id for group in groups_of(read_samples(step / "scored.parquet"))] == kept
    assert {line["reason"] for line in lines} >= {"useful", "equal rewards"} and len(kept) == 4
    metrics = read_json(step / "report.json")["metrics"]
    assert metrics["draws/num_draws"] == lines[-1]["draw"] == len([*(step / "draws").iterdir()]) >= 2
    assert metrics["reward/frac_zero_std_groups"] == metrics["draws/num_filled_up"] / 4
    assert metrics["reward/mean"] != metrics["draws/mean_reward"]
    again = undisturbed / "runs/again/steps/000000"
    assert (
        read_json(again / "manifest.json")["prompts"]["draws"]["sha256"]
        == read_json(step / "manifest.json")["prompts"]["draws"]["sha256"]
    )

    workspace = tmp_path / "killed"
    killed = program_with(config, workspace, PROGRAM)
    second = workspace / "runs/r/steps/000000/draws/02"
    # From the inputs' key on the rollout has ended: one killed before it takes its samples from the journal and writes the file again.
    begun = [second / "samples.inputs_key.json", second / "scores.journal"]
    assert becomes(lambda: all(path.exists() for path in begun), within_s=800), (workspace / "said.log").read_text()[-4000:]
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    sampled = {path: path.stat().st_mtime_ns for path in second.parent.glob("*/samples.parquet")}
    assert len(sampled) == 2
    (workspace / "go").touch()
    step_again = finished(config, workspace)
    assert {path: path.stat().st_mtime_ns for path in sampled} == sampled, "sampled again"
    both = [read_json(folder / "manifest.json") for folder in (step, step_again)]
    for record in ("prompts", "scored", "batch"):
        assert both[0][record]["file"]["sha256"] == both[1][record]["file"]["sha256"]
    assert both[0]["prompts"]["draws"]["sha256"] == both[1]["prompts"]["draws"]["sha256"]
    assert both[0]["adapter_out"]["weights"]["sha256"] == both[1]["adapter_out"]["weights"]["sha256"]
