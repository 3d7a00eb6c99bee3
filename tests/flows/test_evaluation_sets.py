"""Evaluations of several sets: killed -9 in the second one, and what two adapters differ by.

As in test_run_killed.py, each process starts a Prefect server of its own.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from shared import becomes, program_with

from infra.config import EvaluationConfig, RunConfig

pytestmark = pytest.mark.timeout(900)

PROGRAM = """
import pathlib, sys
from flows.evaluate import evaluate
from infra.config import RunConfig
print(evaluate(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()), 0, against=0).model_dump_json())
"""
WAITS = """
import pathlib, time
def score(*, completion, answer):
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.05)
    return float(completion.rsplit("#### ", 1)[-1] == answer.rsplit("#### ", 1)[-1])
"""


def test_an_evaluation_that_is_killed_in_its_second_set_does_not_ask_the_first_again(scripted: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    sets = ["first?num_prompts=6&num_samples=2", {"name": "second", "reward": f"{tmp_path / 'waits.py'}:score", "num_prompts": 5}]
    config = scripted.but(evaluation=EvaluationConfig(sets=sets), reward=scripted.reward.but(timeout_s=500.0, workers=1))  # type: ignore[arg-type]
    killed = program_with(config, tmp_path, PROGRAM, stdout=subprocess.PIPE)
    folder = tmp_path / "runs/r/evaluations"
    assert becomes(lambda: bool([*folder.glob("*-second-*/greedy.scores.journal")]), within_s=500), (
        tmp_path / "said.log"
    ).read_text()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    (done,) = folder.glob("*-first-*/evaluation.json")
    assert not [*folder.glob("*-second-*/evaluation.json")]
    files = [done, done.with_name("greedy.parquet"), done.with_name("sampled.parquet"), *folder.glob("*-second-*/greedy.journal")]
    before = {path: path.stat().st_mtime_ns for path in files[:3]}
    (journal,) = files[3:]
    answered = len(journal.read_bytes().splitlines())

    (tmp_path / "go").touch()
    again = program_with(config, tmp_path, PROGRAM, stdout=subprocess.PIPE)
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, (tmp_path / "said.log").read_text()[-4000:]
    assert {path: path.stat().st_mtime_ns for path in before} == before, "asked again"
    made = json.loads(said.splitlines()[-1])
    assert [(each["set_name"], each["num_prompts"]) for each in made["evaluations"]] == [("first", 6), ("second", 5)]
    assert answered == 1 + 5, "the second set's answers were all in the journal"
    assert [each["reward"]["mean"] for each in made["differences"]] == [0.0, 0.0], "an adapter and itself"
    assert not [*folder.glob("*/*.journal")]
