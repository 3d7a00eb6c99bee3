"""Rollouts whose episodes are those of tasksets of verifiers: the real verifiers, an engine without a model."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.forms import tasksets
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments import episodes
from infra.failures import EngineUnavailable
from infra.records import PromptBatch
from infra.rewards import client
from infra.settings import CHECKOUT
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.samples import Sample, read_samples
from tasks.roll_out import roll_out

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (CHECKOUT / ".venv-verifiers/bin/python").exists(),
        reason="no verifiers: `python3 infra/setup/bootstrap.py --verifiers` makes it",
    ),
]
TASKSETS = Path(__file__).parents[1] / "tasksets"
TWO_AGENTS = """
import verifiers.v1 as vf
__all__ = ["Config", "Judged", "None_"]
class None_(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return []
class Config(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
class Judged(vf.Env[Config]):
    async def run(self, task, agents):
        pass
"""
CLOUD_TOOLS = """
import verifiers.v1 as vf
__all__ = ["None_"]
class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    pass
class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig(runtime={"type": "docker"}))]
class None_(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return []
"""
OWN_HARNESS = """
import verifiers.v1 as vf
__all__ = ["None_", "Own"]
class Own(vf.Harness[vf.HarnessConfig]):
    async def launch(self, *arguments, **named):
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
class None_(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return []
"""
Play = Callable[..., list[Sample]]


@pytest.fixture
def play(workspace: Path, random_tiny: Path) -> Iterator[Play]:
    """Roll out one episode for each of the tasks, whose prompts are said to be others: what the engine without a model says is in them."""
    adapter = untrained_adapter(random_tiny)

    def made(taskset: str, *tasks: dict[str, object], **changes: object) -> list[Sample]:
        name = str(TASKSETS / taskset)
        columns = tasksets.table_of(name).columns
        rows = []
        for number, task in enumerate(tasks):
            row = {key: values[number] for key, values in columns.items()}
            row["task"] = row["task"] | task
            rows.append(
                Prompt(number, number, str(row["question"]), str(row["answer"]), [4, 5, 6 + number], 70 + number, row)._asdict()
            )
        path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
        prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=len(rows), dataset_fingerprint="f", first_row=0)
        fields = {"id": name, "workers": 1, "max_failed_frac": 1.0} | changes
        config = PlayedEnvironment.model_validate(fields)
        engine, sampling = (
            EngineConfig(kind="scripted", max_context_tokens=2048),
            SamplingConfig(group_size=1, max_output_tokens=96),
        )
        return read_samples(path_of(roll_out.fn(engine, sampling, prompts, adapter, None, config).file))

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def test_a_taskset_of_one_turn_gives_its_rewards_and_metrics(play: Play) -> None:
    right, wrong = play("ratchet_sums", {"prompt": "<say>It is 2 or ####</say>"}, {"prompt": "<say>no idea</say>"})
    assert (right.reward, right.num_turns, right.text) == (1.1, 1, "It is 2 or ####")
    assert right.reward_parts == {"is_right": 1.0, "has_form": 1.0, "num_letters": 15.0}
    assert (wrong.reward, wrong.unjudged) == (0.0, "")


def test_a_taskset_with_a_tool_calls_it_and_its_result_is_given(play: Play, workspace: Path) -> None:
    call = json.dumps({"name": "calculator_multiply", "arguments": {"first": 12, "second": 7}})
    (sample,) = play("ratchet_calculator", {"prompt": f"<say><tool_call>\n{call}\n</tool_call></say>"}, max_turns=3)
    assert (sample.num_turns, sample.stop_reason, sample.reward) == (3, "max_turns", 0.0)
    assert sample.text.count("<tool_response>\n84\n</tool_response>") == 2
    assert read_json(workspace / "runs/r/steps/000000/measures/roll_out.json")["tool_calls"] == 3


def test_a_call_that_cannot_be_made_has_an_error_as_its_result(play: Play) -> None:
    call = json.dumps({"name": "divide", "arguments": {}})
    (sample,) = play("ratchet_calculator", {"prompt": f"<say><tool_call>\n{call}\n</tool_call></say>"}, max_turns=2)
    assert "error: no tool 'divide'; there are calculator_multiply" in sample.text


def test_a_game_of_several_turns_is_played(play: Play) -> None:
    found, lost = play("ratchet_number_game", {}, {})
    assert found.num_turns == lost.num_turns == 3
    assert "lower" in found.text and found.stop_reason == "done"


def test_after_a_kill_its_turns_are_taken_from_the_record(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(2, patch)
        with pytest.raises(EngineUnavailable):
            play("ratchet_number_game", {})
    asked = engine_dies_at(99, monkeypatch)
    (sample,) = play("ratchet_number_game", {})
    assert (sample.num_turns, len(asked)) == (3, 1)


def test_an_episode_without_room_in_the_context_ends_with_its_reward(play: Play) -> None:
    long = "A word. " * 700
    (sample,) = play("ratchet_calculator", {"prompt": long})
    assert (sample.reward, sample.unjudged) == (None, "environment failed")  # not one turn


def test_an_episode_that_takes_too_long_has_failed(play: Play) -> None:
    (sample,) = play("ratchet_number_game", {}, episode_timeout_s=0.01)
    assert (sample.reward, sample.unjudged) == (None, "environment failed")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import nothing_like_it", "cannot be loaded: ModuleNotFoundError"),
        ("", "cannot be loaded: AttributeError: taskset module 'mine' defines no `__all__`"),
        (TWO_AGENTS, "has the agents solver, judge: one agent is supported"),
        (CLOUD_TOOLS, "tool server 'tools' is at a runtime of type 'docker', only local processes are supported"),
    ],
)
def test_a_taskset_that_cannot_be_used_is_refused_in_one_line(workspace: Path, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(content)
    config = PlayedEnvironment(id=str(tmp_path / "mine.py"), workers=1, max_failed_frac=0.0)
    with pytest.raises(ValueError, match=re.escape(said)):
        episodes.check(config, "digest")
    with pytest.raises(ValueError, match=re.escape(said)):
        tasksets.table_of(config.id)
    client.close_all()


@pytest.mark.parametrize("field", [{"turn_timeout_s": 5}, {"max_observation_tokens": 64}, {"repeats_tools": False}])
def test_a_limit_that_a_tasksets_own_harness_does_not_have_is_refused(
    workspace: Path, tmp_path: Path, field: dict[str, object]
) -> None:
    (tmp_path / "mine.py").write_text(OWN_HARNESS)
    config = PlayedEnvironment.model_validate({"id": str(tmp_path / "mine.py"), "workers": 1, "max_failed_frac": 0.0})
    episodes.check(config, "digest")
    with pytest.raises(ValueError, match=rf"environment\.{next(iter(field))} .* has no effect .* a harness of its own"):
        episodes.check(config.but(**field), "digest")
    episodes.check(PlayedEnvironment.model_validate({**dict(config), "id": str(TASKSETS / "ratchet_sums")} | field), "digest")
    client.close_all()
