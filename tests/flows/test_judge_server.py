"""A step whose samples a second model judges, in a server of its own: asleep, asked and killed; replayed; evaluated.

As in test_run_killed.py, each process starts a Prefect server of its own.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
from killed_steps import check_judged, digests, finished, paid
from shared import program_with

from flows import drawing
from infra.concurrency.deadline import NO_DEADLINE
from infra.config import EvaluationConfig, RunConfig
from infra.store.files import read_json

pytestmark = pytest.mark.timeout(1800)

PROGRAM = """
import os, pathlib, signal, sys
from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.rewards.judges.ledger import Ledger
from tasks.rewards import by_engine

by_engine.NUM_AT_A_TIME = 4
num_to_live, add, wake = int(sys.argv[2]), Ledger.add, ScriptedEngine.wake

def noted(engine):
    with open(os.environ["RATCHET_WORKSPACE"] + "/woken", "a") as file:
        file.write(f"{'judge' if engine.replica else 'engine'}\\n")
    return wake(engine)

def counted(*payment):
    global num_to_live
    add(*payment)
    num_to_live -= 1
    if not num_to_live:
        os.kill(os.getpid(), signal.SIGKILL)

Ledger.add, ScriptedEngine.wake = counted, noted
rl_step(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()))
for number, first in enumerate(sys.argv[3:]):
    replay_step("r", 0, f"again-{number}", first)
"""


def config_of(scripted: RunConfig, judge: Path) -> RunConfig:
    how = {"by": "model", "model": str(judge), "rubric": "{question} {completion}", "score_pattern": r"#### (\d)"}
    how |= {"max_score": 9, "max_output_tokens": 16, "server": {"max_context_tokens": 256}}
    return scripted.but(
        num_steps=1,
        evaluation=EvaluationConfig(every=0),
        sampling=scripted.sampling.but(group_size=2),
        reward={"name": "rubric", "judge": how, "max_unjudged_frac": 1.0},
    )


def test_the_engine_makes_room_before_the_judge_is_asked_and_only_then(
    scripted: RunConfig, random_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(drawing, "release_memory", lambda *inputs: done.append("engine released"))
    monkeypatch.setattr(drawing, "ask_judge", lambda *inputs: done.append("judge asked"))
    nothing: Any = (None, None, None, NO_DEADLINE)
    drawing.have_judged(scripted.engine, scripted.reward, *nothing)
    assert done == []
    drawing.have_judged(scripted.engine, config_of(scripted, random_tiny).reward, *nothing)
    assert done == ["engine released", "judge asked"]
    with drawing.released(scripted.engine, config_of(scripted, random_tiny).reward, nothing[2]):
        assert done == ["engine released", "judge asked"], "the engine sleeps already"


def test_a_second_model_judges_in_its_turn_and_a_replay_pays_nothing(
    scripted: RunConfig, random_tiny: Path, tmp_path: Path
) -> None:
    finished(config_of(scripted, random_tiny), tmp_path, PROGRAM, "score")
    step = check_judged(tmp_path, "again-0")
    woken = (tmp_path / "woken").read_text().split()
    assert woken[0] == "judge" and woken.count("judge") >= 2, "checked and asleep before the engine begins, then asked"
    plan = read_json(step / "manifest.json")["colocation"]["judge"]
    assert plan.startswith("rollout: engine with ") and f"judging: judge with {random_tiny} (" in plan
    assert {"time/start_judge_s", "time/judge_s"} <= read_json(step / "report.json")["metrics"].keys()


@pytest.mark.full
def test_a_step_that_is_killed_while_the_second_model_judges_pays_nothing_twice(
    scripted: RunConfig, random_tiny: Path, tmp_path: Path
) -> None:
    config, undisturbed, disturbed = config_of(scripted, random_tiny), tmp_path / "undisturbed", tmp_path / "disturbed"
    finished(config, undisturbed, PROGRAM, "draw_prompts")
    step = check_judged(undisturbed, "again-0")

    killed = program_with(config, disturbed, PROGRAM, "6")
    assert killed.wait(timeout=900) == -signal.SIGKILL, (disturbed / "said.log").read_text()[-4000:]
    assert 1 <= len(paid(disturbed)) <= 6
    finished(config, disturbed, PROGRAM)
    assert len(paid(disturbed)) == len({*paid(disturbed)}) == len(paid(undisturbed))
    assert digests(disturbed / "runs/r/steps/000000") == digests(step)
