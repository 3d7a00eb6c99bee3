"""environment.keep_reasoning false: each turn is a trajectory of its own, as Qwen3's template has it. A user's game or agent in worker processes, the
real gateway, a scripted engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversations import TAGS, TEMPLATES
from shared import untrained_adapter
from transformers import AutoTokenizer
from turns import engine_dies_at

from infra.config import BatchConfig, EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.packing import packed
from infra.data.prompts import Prompt
from infra.data.turns.credit import with_advantages
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable
from infra.records import PromptBatch, Rollouts
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, read_samples, trajectory_of
from tasks.roll_out import roll_out

GAME = """
import os, signal
HERE = os.path.dirname(os.path.abspath(__file__))

class Game:
    restore = {restore!r}

    def reset(self, task):
        self.task, self.turn = task, 0
        return self.asked()

    def asked(self):
        return "<say><think>\\nso %s\\n</think>\\n\\nmove %d</say>" % (self.task["answer"], self.turn)

    def step(self, action):
        assert action == "move %d" % self.turn, action
        self.turn += 1
        if self.turn == 2 and os.path.exists(HERE + "/kills"):
            os.unlink(HERE + "/kills")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.asked(), float(self.turn * int(self.task["answer"])), self.turn == 2 + int(self.task["answer"])

    def snapshot(self):
        return [self.task, self.turn]

    def resume(self, state):
        self.task, self.turn = state
"""
AGENT = """
async def run(task, client):
    messages = [{"role": "user", "content": "<say><think>\\nso\\n</think>\\n\\nfirst</say>"}]
    answer = await client.chat(messages)
    assert (answer["reasoning_content"], answer["content"]) == ("so", "first")
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "<say>second</say>"}]
    await client.chat(messages)
    return float(task["answer"])
"""
Play = Callable[..., tuple[Rollouts, list[Sample], dict[str, float]]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from infra.tiny_model.architecture import random_model
    from infra.tiny_model.tokenizer import train_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models") / "qwen3", train_tokenizer()
    tokenizer.add_tokens(TAGS)
    tokenizer.chat_template = TEMPLATES["Qwen3"]
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, 0).save_pretrained(folder)
    return folder


@pytest.fixture
def play(tmp_path: Path, workspace: Path, qwen3: Path) -> Iterator[Play]:
    """Roll out two episodes of each of two prompts; those of prompt n have 2 + n turns. Returns record, samples and measures."""
    adapter = untrained_adapter(qwen3)
    rows = [Prompt(n, n, "2 + 2?", str(n), [4, 5, 6 + n], 70 + n)._asdict() for n in range(2)]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=2, dataset_fingerprint="f", first_row=0)

    def made(text: str = GAME, restore: str = "replay", **fields: object) -> tuple[Rollouts, list[Sample], dict[str, float]]:
        (tmp_path / "mine.py").write_text(text.format(restore=restore) if text is GAME else text)
        name = f"{tmp_path / 'mine.py'}:{'Game' if text is GAME else 'run'}"
        about: dict[str, object] = {"name": name, "workers": 1, "max_failed_frac": 0.0, "keep_reasoning": False}
        sampling = SamplingConfig(group_size=2, max_output_tokens=48)
        config = PlayedEnvironment.model_validate(about | fields)
        record = roll_out.fn(EngineConfig(kind="scripted"), sampling, prompts, adapter, None, config)
        return record, read_samples(path_of(record.file)), read_json(StepFolder.of(prompts).path / "measures/roll_out.json")

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def forget(workspace: Path) -> None:
    StepFolder(workspace / "runs/r/steps/000000").samples_inputs.unlink()


def test_each_turn_of_a_game_is_a_trajectory_with_its_reward_and_the_context_of_the_template(play: Play, qwen3: Path) -> None:
    record, samples, measures = play()
    assert [(s.prompt_id, s.sample_index, s.branch, s.first_turn, s.num_turns) for s in samples] == [
        (prompt, index, turn, turn, 1) for prompt in range(2) for index in range(2) for turn in range(2 + prompt)
    ]
    assert [s.turn_rewards for s in samples if s.episode == (1, 0)] == [(1.0,), (2.0,), (3.0,)]
    assert {(s.prompt_id, s.reward, s.unjudged, s.stop_reason) for s in samples} == {(0, 0.0, "", "done"), (1, 6.0, "", "done")}
    assert (record.num_samples, record.num_turns, record.num_truncated) == (4, 10, 0)
    assert record.num_given_tokens == sum(len(s.prompt_tokens) for s in samples if s.branch)
    assert (measures["branches"], measures["prefix_mismatches"]) == (0, 0)
    tokenizer, talk = AutoTokenizer.from_pretrained(str(qwen3)), list[dict[str, str]]()
    for turn, sample in enumerate(s for s in samples if s.episode == (1, 0)):
        thought = "<think>\nso 1\n</think>\n\n"
        talk.append({"role": "user", "content": f"<say>{thought}move {turn}</say>"})
        expected = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        assert list(sample.prompt_tokens) == list(expected) and sample.text == f"{thought}move {turn}"
        assert tokenizer.decode(sample.prompt_tokens).count("<think>") == turn + 1, "those of the user's messages alone"
        talk.append({"role": "assistant", "content": sample.text})


def test_with_reasoning_the_same_game_has_one_trajectory_that_keeps_it(play: Play, qwen3: Path) -> None:
    record, samples, _ = play(keep_reasoning=True)
    assert [(s.branch, s.num_turns) for s in samples] == [(0, 2), (0, 2), (0, 3), (0, 3)]
    assert (record.num_samples, record.num_turns) == (4, 10)
    whole = AutoTokenizer.from_pretrained(str(qwen3)).decode([*samples[2].prompt_tokens, *samples[2].output_tokens])
    assert whole.count("<think>\nso 1") == 2 * 3, "asked for and sampled"


def test_an_agent_that_leaves_reasoning_out_has_a_trajectory_for_each_turn(play: Play) -> None:
    _, samples, _ = play(AGENT)
    assert [(s.branch, s.num_turns, s.reward, s.turn_rewards) for s in samples[4:]] == [(0, 1, 1.0, None), (1, 1, 1.0, None)] * 2
    _, kept, _ = play(AGENT, keep_reasoning=True)
    assert [(s.branch, s.num_turns) for s in kept] == [(0, 2)] * 4


def test_turns_have_the_advantages_of_an_episode_that_is_one_trajectory(play: Play, workspace: Path) -> None:
    _, own, _ = play()
    _, whole, _ = play(keep_reasoning=True)
    bonus = (0.0, 1.0, 0.5, 2.0)
    for config in (BatchConfig(), BatchConfig(advantage_level="turn", turn_discount=0.5), BatchConfig(advantage="reinforce_pp")):
        found = []
        for samples in (own, whole):
            judged = [replace(s, reward=(s.reward or 0.0) + bonus[2 * s.prompt_id + s.sample_index]) for s in samples]
            tensors = packed(with_advantages(judged, config), config)
            found.append(tensors["advantages"][tensors["loss_mask"] == 1])
        assert len(found[0]) and np.array_equal(*found), config


@pytest.mark.parametrize("restore", ["replay", "restart", "snapshot"])
def test_after_a_kill_the_trajectories_are_the_undisturbed_ones(
    restore: str, play: Play, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, undisturbed, _ = play(restore=restore)
    forget(workspace)
    with monkeypatch.context() as patch:
        engine_dies_at(6, patch)  # in the third turn of the third episode
        with pytest.raises(EngineUnavailable):
            play(restore=restore)
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        _, samples, measures = play(restore=restore)
    assert samples == undisturbed
    assert [trajectory_of(s).sha256 for s in samples] == [trajectory_of(s).sha256 for s in undisturbed]
    again = 2 if restore == "restart" else 0
    assert len(asked) == 10 - 6 + again
    assert (measures["num_kept"], measures["num_kept_turns"], measures["num_lost_turns"]) == (2, 2 - again, again)
    assert (measures["resumed"] > 0) == (restore == "snapshot")


@pytest.mark.parametrize("restore", ["replay", "snapshot"])
def test_where_a_worker_is_killed_another_one_goes_on(restore: str, play: Play, workspace: Path, tmp_path: Path) -> None:
    _, undisturbed, _ = play(restore=restore)
    forget(workspace)
    (tmp_path / "kills").touch()
    _, samples, _ = play(restore=restore)
    assert not (tmp_path / "kills").exists() and samples == undisturbed
