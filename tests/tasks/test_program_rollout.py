"""Rollouts whose episodes are played by a program that knows only OpenAI's protocol."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments import episodes as playing
from infra.environments.examples import agent_program
from infra.failures import EngineUnavailable
from infra.records import PromptBatch
from infra.rewards import client
from infra.store.files import path_of, record_of, write_json_lines
from infra.store.samples import Sample, read_samples
from tasks.roll_out import roll_out
from tasks.support.episode_rollout import source_of

COMMAND = (sys.executable, str(agent_program.__file__))
WRONG, RIGHT = "2 + 2? <say>2 + 2 = 5</say>", "2 + 2? <say>2 + 2 = 4\n#### 4</say>"
Play = Callable[..., list[Sample]]


@pytest.fixture
def play(workspace: Path, random_tiny: Path) -> Iterator[Play]:
    """Roll out one episode for each of two questions."""
    adapter = untrained_adapter(random_tiny)
    rows = [Prompt(n, n, text, "2 + 2 = 4\n#### 4", [4, 5, 6 + n], 70 + n)._asdict() for n, text in enumerate((WRONG, RIGHT))]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=2, dataset_fingerprint="f", first_row=0)

    def made(*command: str, max_turns: int = 4) -> list[Sample]:
        config = PlayedEnvironment(command=command or COMMAND, workers=1, max_failed_frac=1.0, max_turns=max_turns)
        sampling = SamplingConfig(group_size=1, max_output_tokens=24)
        return read_samples(path_of(roll_out.fn(EngineConfig(kind="scripted"), sampling, prompts, adapter, None, config).file))

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def test_a_program_plays_and_after_a_kill_gets_its_recorded_turns_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(3, patch)
        with pytest.raises(EngineUnavailable):
            play()
    asked = engine_dies_at(99, monkeypatch)
    samples = play()
    assert [(s.num_turns, s.reward, s.branch) for s in samples] == [(4, 0.0, 0), (1, 1.0, 0)]
    assert "2 + 2 = 4" in samples[0].text
    assert len(asked) == 5 - 3


def test_a_program_that_fails_has_no_reward(play: Play) -> None:
    samples = play(sys.executable, "-c", "raise SystemExit(3)")
    assert [(s.reward, s.unjudged) for s in samples] == [(None, "environment failed")] * 2


def test_a_program_gets_no_more_than_its_turns(play: Play) -> None:
    assert [(s.num_turns, s.reward, s.unjudged) for s in play(max_turns=3)] == [
        (3, None, "environment failed"),  # it wanted a fourth one, and has no care for that
        (1, 1.0, ""),
    ]


def test_a_program_that_does_not_exist_is_refused_in_one_line(workspace: Path) -> None:
    config = PlayedEnvironment(command=("/nowhere/agent", "--flag"), max_failed_frac=0.0)
    with pytest.raises(ValueError, match=r"environment '/nowhere/agent --flag': program '/nowhere/agent' does not exist"):
        playing.check(config, "digest")
    client.close_all()


def test_the_files_of_a_command_and_what_a_script_imports_are_in_its_digest(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import helper_of_agent")
    (tmp_path / "helper_of_agent.py").write_text("VALUE = 1")
    config = PlayedEnvironment(command=(sys.executable, str(tmp_path / "agent.py")), max_failed_frac=0.0)
    seen = [source_of(config)]
    (tmp_path / "helper_of_agent.py").write_text("VALUE = 2.0")
    seen.append(source_of(config))
    (tmp_path / "agent.py").write_text("22")
    seen.append(source_of(config))
    (tmp_path / "agent.py").write_text("print 'of another Python'")
    seen.append(source_of(config))
    assert len(set(seen)) == 4
