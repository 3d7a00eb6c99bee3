"""Rollouts of a taskset whose program is killed, hangs or says what it should not. A stand-in is in the place of verifiers."""

import sys
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
from infra.failures import EngineUnavailable, RewardFailed
from infra.records import PromptBatch
from infra.rewards import client
from infra.store.files import path_of, record_of, write_json_lines
from infra.store.samples import Sample, read_samples
from tasks.roll_out import roll_out

TURN = "<say>fine</say>"
Play = Callable[..., Sample]


@pytest.fixture
def play(workspace: Path, random_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Roll out one episode."""
    monkeypatch.setattr(episodes, "PLAY_TASKSET", "taskset_stand_in.play")
    monkeypatch.setattr(tasksets, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(episodes, "MARGIN_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    adapter = untrained_adapter(random_tiny)

    def made(fault: str = "", **changes: object) -> Sample:
        task = {"prompt": TURN, "fault": fault, "done": str(workspace / "done"), **changes.pop("task", {})}  # type: ignore[dict-item]
        row = Prompt(0, 0, TURN, "", [4, 5, 6], 70, {"task": task})._asdict()
        path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [row])
        prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=1, dataset_fingerprint="f", first_row=0)
        fields = {"id": "my_taskset", "workers": 1, "max_failed_frac": 1.0, "episode_timeout_s": 60.0} | changes
        config, sampling = PlayedEnvironment.model_validate(fields), SamplingConfig(group_size=1, max_output_tokens=16)
        (sample,) = read_samples(
            path_of(roll_out.fn(EngineConfig(kind="scripted"), sampling, prompts, adapter, None, config).file)
        )
        return sample

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def test_an_episode_has_its_reward_its_parts_and_its_stop_reason(play: Play) -> None:
    sample = play()
    assert (sample.reward, sample.reward_parts, sample.num_turns) == (0.5, {"form": 1.0}, 2)
    assert sample.stop_reason == "max_turns"


def test_a_program_that_is_killed_plays_again_and_no_turn_is_sampled_twice(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine_dies_at(99, monkeypatch)
    sample = play("killed")
    assert (sample.reward, sample.num_turns, len(asked)) == (0.5, 2, 2)


@pytest.mark.parametrize("fault", ["exit", "garbage", "raises", "stops"])
def test_an_episode_whose_program_fails_has_no_reward(play: Play, fault: str) -> None:
    sample = play(fault)
    assert (sample.reward, sample.unjudged, sample.stop_reason) == (None, "environment failed", "failed")


def test_an_episode_that_hangs_is_ended_and_tried_once_more(play: Play) -> None:
    sample = play("hang", episode_timeout_s=4.0)
    assert (sample.reward, sample.num_turns) == (0.5, 2)


def test_too_many_failed_episodes_stop_the_step_and_say_why(play: Play) -> None:
    with pytest.raises(
        RewardFailed, match=r"environment 'my_taskset' failed in 1 of 1 episodes.*RuntimeError: the taskset's episode failed"
    ):
        play("raises", max_failed_frac=0.0)


def test_after_the_engine_died_recorded_turns_are_given_back(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(1, patch)
        with pytest.raises(EngineUnavailable):
            play()
    asked = engine_dies_at(99, monkeypatch)
    assert (play().num_turns, len(asked)) == (2, 1)


@pytest.mark.parametrize(("repeats", "effects", "unjudged"), [(True, "xx", ""), (False, "x", "outcome unknown")])
def test_only_tools_that_may_be_called_again_are(play: Play, workspace: Path, repeats: bool, effects: str, unjudged: str) -> None:
    sample = play("killed", task={"tool": str(workspace / "effects")}, repeats_tools=repeats)
    assert ((workspace / "effects").read_text(), sample.unjudged) == (effects, unjudged)
