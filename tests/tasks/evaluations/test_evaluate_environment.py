"""Evaluations whose answers are episodes: a user's game in worker processes, the real gateway, a scripted engine."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from turns import engine_dies_at

from infra.config import DataConfig, EngineConfig, EnvironmentConfig, EvaluationConfig, RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable
from infra.gateway.session.calls import CallRecord
from infra.gateway.session.records import TurnJournal
from infra.rewards import client
from infra.runs import evaluations
from infra.runs.lineage import adapter_at
from infra.store.samples import Sample, read_samples, trajectory_of
from tasks.evaluations.evaluate_adapter import evaluate_adapter

GAME = """
import os
HERE = os.path.dirname(os.path.abspath(__file__))

class Game:
    def reset(self, task):
        self.number, self.turn = len(task["question"]), 0
        return "<say>%d</say>" % self.number

    def step(self, action):
        self.turn += 1
        assert self.number % 5 or not os.path.exists(HERE + "/broken")
        return "<say>again</say>", float(self.number % 2), self.turn == 2
"""


@pytest.fixture
def config(workspace: Path, random_tiny: Path) -> Iterator[RunConfig]:
    (workspace / "game.py").write_text(GAME)
    yield RunConfig(
        name="mine",
        model=str(random_tiny),
        engine=EngineConfig(kind="scripted"),
        data=DataConfig(max_prompt_tokens=128),
        environment=EnvironmentConfig(name=f"{workspace / 'game.py'}:Game", workers=2),
        evaluation=EvaluationConfig(num_prompts=4, num_samples=2, pass_at_k=(1, 2)),
    )
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def evaluated(config: RunConfig) -> tuple[list[Sample], list[Sample]]:
    adapter = adapter_at(config, 0)
    evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
    folder = evaluations.folder_of(adapter, config.eval_config)
    assert not list(folder.glob("*.journal"))
    return read_samples(folder / "greedy.parquet"), read_samples(folder / "sampled.parquet")


def test_an_evaluation_with_an_environment_plays_its_questions(config: RunConfig) -> None:
    greedy, sampled = evaluated(config)
    (made,) = evaluations.of_run("mine", config.eval_config)
    assert (len(greedy), len(sampled), made.mean_turns, made.num_unjudged) == (4, 8, 2.0, 0)
    assert made.mean_reward == fmean(sample.reward or 0.0 for sample in greedy)
    assert made.pass_at_1 == fmean(sample.reward == 2.0 for sample in greedy) == made.pass_at_k["2"]
    assert made.figures["mean_turns"] == 2.0
    assert (
        made.mean_output_tokens
        == fmean(sample.num_sampled_tokens for sample in greedy)
        < fmean(len(sample.output_tokens) for sample in greedy)
    )


CALLS = """
from infra.environments.tools import tool

@tool(idempotent=True)
def look(place: int) -> str:
    return "nothing"

class Game:
    def reset(self, task):
        return "<say>" + look(place=1) + "</say>"

    def step(self, action):
        return "", 1.0, True
"""


def test_equal_calls_of_tools_have_other_keys_in_another_evaluation_and_in_its_sampled_answers(
    config: RunConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "game.py").write_text(CALLS)
    keys: dict[str, int] = {}
    add_call = TurnJournal.add_call

    def noted(journal: TurnJournal, call: CallRecord) -> None:
        keys[call.key] = keys.get(call.key, 0) + 1
        add_call(journal, call)

    monkeypatch.setattr(TurnJournal, "add_call", noted)
    for version in range(2):
        adapter = adapter_at(config, 0).model_copy(update={"version": version})
        evaluate_adapter.fn(config.engine, config.eval_config, config.data, adapter)
    assert len(keys) == 2 * (4 + 8) and set(keys.values()) == {2}, "each call is on record before it is made, and with its result"


def test_an_evaluation_counts_an_episode_once_where_each_turn_is_a_trajectory(config: RunConfig) -> None:
    whole, _ = evaluated(config)
    other = config.but(name="other", environment=config.environment.but(keep_reasoning=False))
    greedy, sampled = evaluated(other)
    (made,) = evaluations.of_run("other", other.eval_config)
    assert (len(greedy), len(sampled), made.num_answers, made.mean_turns) == (8, 16, 12, 2.0)
    assert made.mean_output_tokens == sum(sample.num_sampled_tokens for sample in greedy) / 4
    assert made.mean_reward == fmean(sample.reward or 0.0 for sample in whole)


def test_an_evaluation_that_is_killed_samples_no_complete_turn_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = evaluated(config)
    other = config.but(name="other")
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)
        with pytest.raises(EngineUnavailable):
            evaluated(other)
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        again = evaluated(other)
    assert len(asked) == 2 * (4 + 8) - 5
    assert [[trajectory_of(s).sha256 for s in each] for each in again] == [
        [trajectory_of(s).sha256 for s in each] for each in undisturbed
    ]


def test_failed_episodes_are_counted_and_are_in_no_mean(config: RunConfig, workspace: Path) -> None:
    greedy, _ = evaluated(config)
    (workspace / "broken").touch()
    broken, sampled = evaluated(config.but(name="other"))
    (made,) = evaluations.of_run("other", config.eval_config)
    failed = [sample.unjudged == "environment failed" for sample in broken]
    assert 0 < sum(failed) < 4
    assert made.num_unjudged == sum(sample.reward is None for sample in [*broken, *sampled]) and not made.is_eligible
    assert made.mean_reward == fmean(
        sample.reward or 0.0 for sample, is_failed in zip(greedy, failed, strict=True) if not is_failed
    )


def test_a_set_may_name_an_environment_and_one_with_a_reward_has_none(config: RunConfig, workspace: Path) -> None:
    game = config.environment.name
    sets = [
        {"name": "as-the-run"},
        {"name": "short", "environment": {"max_turns": 1}},
        {"name": "plain", "reward": "gsm8k_numeric"},
        {"name": "none", "environment": ""},
        {"name": "program", "environment": {"command": ["./agent"]}},
    ]
    found = config.but(evaluation=EvaluationConfig(sets=sets)).eval_configs  # type: ignore[arg-type]  # as it comes from JSON
    environments = {name: each.environment for name, each in found.items()}
    assert environments["as-the-run"] == config.played and environments["plain"] is environments["none"] is None
    program = environments["program"]
    assert program and (program.name, program.command) == ("", ("./agent",))
    with pytest.raises(ValueError, match=r"environment.name '/.*:Game' with environment.command \['a'\]: leave one of them out"):
        config.environment.but(command=("a",))
    short = environments["short"]
    assert short and (short.name, short.max_turns) == (game, 1)
    with pytest.raises(ValueError, match=r"'both' environment 'a.py:Game' with a reward of its own"):
        config.but(evaluation={"sets": [{"name": "both", "environment": "a.py:Game", "reward": "gsm8k_numeric"}]})
    with pytest.raises(ValueError, match=r"top_p 0.9 with environment .* is not supported: leave it out"):
        config.but(evaluation={"top_p": 0.9, "num_samples": 2, "pass_at_k": (1,)})


def test_an_environment_is_part_of_the_digest_of_an_evaluation_and_how_it_runs_is_not(config: RunConfig) -> None:
    def digest(**changes: object) -> str:
        return evaluations.eval_digest(config.but(environment=config.environment.but(**changes)).eval_config)

    assert digest() == digest(workers=5, memory_mib=1024)
    assert len({digest(), digest(max_turns=7), digest(name="")}) == 3
