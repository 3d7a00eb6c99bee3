"""Dynamic sampling with an environment: the episodes of several draws, of which a step takes the groups with different rewards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import DataConfig, EngineConfig, PlayedEnvironment, RewardConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable
from infra.records import AdapterVersion, Draw, Draws, PromptBatch, Step
from infra.rewards import client
from infra.store.files import path_of, record_of, write_json_lines
from infra.store.layout import step_folder
from infra.store.samples import read_samples
from infra.telemetry.timings import measures_of, summed_draws
from tasks.gather_draws import gather_draws
from tasks.roll_out import roll_out
from tasks.score import score

GAME = """
import os
from infra.environments.tools import tool
HERE = os.path.dirname(os.path.abspath(__file__))

@tool
def note(turn: int) -> str:
    open(HERE + "/notes", "a").write("x")
    return "noted"

class Game:
    def reset(self, task):
        self.task, self.turn = task, 0
        return "<say>" + task["answer"] + "</say>"

    def step(self, action):
        self.turn += 1
        note(turn=self.turn)
        is_second = (os.path.getsize(HERE + "/notes") - 1) // 2 % 2 == 1
        return "<say>again</say>", float(self.task["answer"] == "mixed" and is_second and self.turn == 1), self.turn == 2
"""
ENGINE, SAMPLING = EngineConfig(kind="scripted"), SamplingConfig(group_size=2, max_output_tokens=24)


@pytest.fixture
def adapter(random_tiny: Path, workspace: Path) -> Iterator[AdapterVersion]:
    yield untrained_adapter(random_tiny)
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def prompts_of(workspace: Path, draw: int, answers: list[str]) -> PromptBatch:
    first = 10 * draw
    rows = [Prompt(first + n, first + n, "2 + 2?", answer, [4, 5, 6 + n], 70 + n)._asdict() for n, answer in enumerate(answers)]
    file = record_of(write_json_lines(workspace / f"runs/r/steps/000000/draws/{draw:02d}/prompts.jsonl", rows))
    return PromptBatch(run="r", step=0, draw=draw, file=file, num_prompts=len(rows), dataset_fingerprint="f", first_row=first)


def test_a_step_takes_the_groups_of_episodes_whose_rewards_differ_and_counts_those_that_it_leaves(
    adapter: AdapterVersion, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    environment = PlayedEnvironment(name=f"{tmp_path / 'game.py'}:Game", workers=1, max_failed_frac=0.0)
    first, second = prompts_of(workspace, 1, ["flat", "mixed"]), prompts_of(workspace, 2, ["mixed", "mixed"])
    draws = []
    for prompts in (first, second):
        if prompts is second:
            with monkeypatch.context() as patch:
                engine_dies_at(3, patch)
                with pytest.raises(EngineUnavailable):
                    roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, environment)
        rollouts = roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, environment)
        draws.append(Draw(prompts=prompts, rollouts=rollouts, scored=score.fn(RewardConfig(), rollouts, prompts)))
    assert len((tmp_path / "notes").read_text()) == 16, "two turns of eight episodes, none of them twice"
    made = gather_draws.fn(DataConfig(num_prompts=2, max_draws=2), Step(run="r", index=0, seed=0), Draws(draws=tuple(draws)))
    samples = read_samples(path_of(made.scored.file))
    assert {sample.prompt_id for sample in samples} == {11, 20} and made.scored.num_trainable_groups == 2
    assert (made.rollouts.num_samples, made.rollouts.num_turns, made.rollouts.is_judged) == (4, 8, True)
    assert made.rollouts.num_output_tokens == sum(sample.num_sampled_tokens for sample in samples)
    assert made.rollouts.num_given_tokens + made.rollouts.num_output_tokens == sum(len(s.output_tokens) for s in samples)
    assert all(sample.turn_rewards and sample.segments for sample in samples)
    assert (
        made.prompts.draw_counts["draws/num_more_than_needed"] == 1 and made.prompts.draw_counts["draws/num_equal_rewards"] == 1
    )
    figures = summed_draws(measures_of("r", 0))["roll_out"]
    assert figures["tool_calls"] == 8 + 8 - 2 and figures["num_kept_turns"] == 1
    assert step_folder(first) != step_folder(second)
