"""A step whose samples the run's own engine judges: killed -9 while it judges, and replayed; with one draw and with several.

As in test_run_killed.py, each process starts a Prefect server of its own.
"""

import signal
from pathlib import Path

import pytest
from killed_steps import check_judged, digests, finished, paid
from shared import program_with

from infra.config import EvaluationConfig, RunConfig

pytestmark = pytest.mark.timeout(1800)

PROGRAM = """
import os, pathlib, signal, sys
from flows.replay import replay_step
from flows.step import rl_step
from infra.config import RunConfig
from infra.rewards.judges.ledger import Ledger
from tasks.rewards import by_engine

by_engine.NUM_AT_A_TIME = 4
num_to_live, add = int(sys.argv[2]), Ledger.add

def counted(*payment):
    global num_to_live
    add(*payment)
    num_to_live -= 1
    if not num_to_live:
        os.kill(os.getpid(), signal.SIGKILL)

Ledger.add = counted
rl_step(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()))
for number, first in enumerate(sys.argv[3:]):
    replay_step("r", 0, f"again-{number}", first)
"""
JUDGE = {
    "by": "engine",
    "rubric": "{question} {completion}",
    "score_pattern": r"#### (\d)",
    "max_score": 9,
    "max_output_tokens": 16,
}


def config_of(scripted: RunConfig, max_draws: int) -> RunConfig:
    return scripted.but(
        num_steps=1,
        evaluation=EvaluationConfig(every=0),
        data=scripted.data.but(max_draws=max_draws),
        sampling=scripted.sampling.but(group_size=2),
        reward={"name": "rubric", "judge": JUDGE, "max_unjudged_frac": 1.0},
    )


def adapter_in(folder: Path, model: Path) -> Path:
    """An adapter of PEFT's, which judges."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder / "judge")
    return folder / "judge"


def test_the_engine_judges_several_draws_and_a_replay_pays_nothing(scripted: RunConfig, tmp_path: Path) -> None:
    finished(config_of(scripted, 3), tmp_path, PROGRAM, "score")
    check_judged(tmp_path, "again-0")


@pytest.mark.full
@pytest.mark.parametrize("judge", ["base", "adapter"])
@pytest.mark.parametrize("max_draws", [1, 3])
def test_a_step_that_is_killed_while_its_engine_judges_pays_nothing_twice(
    scripted: RunConfig, model: Path, tmp_path: Path, max_draws: int, judge: str
) -> None:
    config, undisturbed, disturbed = config_of(scripted, max_draws), tmp_path / "undisturbed", tmp_path / "disturbed"
    if judge == "adapter":
        config = config.but(reward=config.reward.but(judge=config.reward.judge.but(adapter=str(adapter_in(tmp_path, model)))))
    finished(config, undisturbed, PROGRAM, "draw_prompts", "score")
    step = check_judged(undisturbed, "again-0", "again-1")

    killed = program_with(config, disturbed, PROGRAM, "6")
    assert killed.wait(timeout=900) == -signal.SIGKILL, (disturbed / "said.log").read_text()[-4000:]
    assert 1 <= len(paid(disturbed)) <= 6
    finished(config, disturbed, PROGRAM)
    assert len(paid(disturbed)) == len({*paid(disturbed)}) == len(paid(undisturbed))
    assert digests(disturbed / "runs/r/steps/000000") == digests(step)
