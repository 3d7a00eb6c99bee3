"""Rollouts of episodes: a user's environment in worker processes, the real gateway, a scripted engine."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments import episodes as playing
from infra.failures import EngineUnavailable, RewardFailed, WrongAnswer
from infra.records import AdapterVersion, PromptBatch, Rollouts
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.layout import StepFolder
from infra.store.samples import Sample, read_samples, trajectory_of
from tasks.roll_out import roll_out
from tasks.support.episode_rollout import source_of

ENGINE, SAMPLING = EngineConfig(kind="scripted"), SamplingConfig(group_size=2, max_output_tokens=24)
GAME = """
import os, signal, time
HERE = os.path.dirname(os.path.abspath(__file__))

class Game:
    {restore}
    def reset(self, task):
        self.task, self.turn = task, 0
        open(HERE + "/resets", "a").write("x")
        return "Say it: <say>first " + task["answer"] + "</say>"

    def step(self, action):
        self.turn += 1
        open(HERE + "/steps", "a").write("x")
        {body}
        return "Again: <say>turn %d</say>" % self.turn, float(action.startswith("first")), self.turn == 3
"""


@pytest.fixture
def adapter(random_tiny: Path) -> AdapterVersion:
    return untrained_adapter(random_tiny)


@pytest.fixture
def prompts(workspace: Path) -> Iterator[PromptBatch]:
    rows = [Prompt(n, n, "2 + 2?", str(n), [4, 5, 6 + n], 70 + n)._asdict() for n in range(2)]
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", rows)
    yield PromptBatch(run="r", step=0, file=record_of(path), num_prompts=2, dataset_fingerprint="f", first_row=0)
    ScriptedEngine.stop_in(workspace)
    client.close_all()


Play = Callable[..., tuple[Rollouts, list[Sample], dict[str, float]]]


@pytest.fixture
def play(tmp_path: Path, prompts: PromptBatch, adapter: AdapterVersion) -> Play:
    """Roll out with a game: body is a line of its step. Returns record, samples and measures."""

    def made(body: str = "pass", restore: str = "", **limits: Any) -> tuple[Rollouts, list[Sample], dict[str, float]]:
        path = tmp_path / "game.py"
        path.write_text(GAME.format(body=body, restore=restore or "pass"))
        fields = {"name": f"{path}:Game", "workers": 2, "max_failed_frac": 0.0}
        config = PlayedEnvironment.model_validate(fields | limits)
        record = roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, config)
        measures = read_json(StepFolder.of(prompts).path / "measures/roll_out.json")
        return record, read_samples(path_of(record.file)), measures

    return made


def test_each_token_of_an_episode_is_sampled_or_given_and_each_turn_has_its_reward(play: Play, adapter: AdapterVersion) -> None:
    record, samples, _ = play()
    assert [(s.prompt_id, s.sample_index) for s in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (record.is_judged, record.num_turns, record.num_samples) == (True, 12, 4)
    for sample in samples:
        assert (sample.num_turns, sample.stop_reason, sample.reward, sample.turn_rewards) == (3, "done", 1.0, (1.0, 0.0, 0.0))
        assert f"first {sample.prompt_id}" in sample.text and "Again:" in sample.text and "turn 2" in sample.text
        trajectory = trajectory_of(sample)
        assert {s.adapter_sha256 for s in trajectory.segments if s.is_sampled} == {adapter.sha256}
        assert np.asarray(sample.output_logprobs)[~sample.is_sampled].any() == np.False_
        assert (np.asarray(sample.output_logprobs)[sample.is_sampled] < 0).all()
    assert record.num_output_tokens + record.num_given_tokens == sum(len(sample.output_tokens) for sample in samples)


def test_a_limit_ends_an_episode_with_the_rewards_that_it_has(play: Play) -> None:
    record, samples, _ = play(max_turns=2)
    assert {(s.stop_reason, s.reward, s.turn_rewards) for s in samples} == {("max_turns", 1.0, (1.0, 0.0))}
    assert record.num_truncated == 4


def test_an_episode_whose_environment_fails_has_no_reward(play: Play) -> None:
    _, samples, _ = play("assert self.task['answer'] == '0' or self.turn < 2", max_failed_frac=0.5)
    assert [(s.reward, s.unjudged, s.stop_reason) for s in samples[2:]] == [(None, "environment failed", "failed")] * 2
    assert [(s.reward, s.unjudged) for s in samples[:2]] == [(1.0, "")] * 2


def test_too_many_failed_episodes_stop_the_step_with_the_place_in_the_users_file_and_are_played_again(
    play: Play, tmp_path: Path
) -> None:
    body = "assert os.path.exists(HERE + '/fixed') or self.task['answer'] == '0', 'no board'"
    with pytest.raises(RewardFailed, match=r"failed in 2 of 4 episodes.*AssertionError: no board at .*game\.py:"):
        play(body)
    (tmp_path / "fixed").touch()
    (tmp_path / "resets").unlink()
    _, samples, measures = play(body)
    assert [sample.reward for sample in samples] == [1.0] * 4
    assert measures["num_kept"] == 2
    assert len((tmp_path / "resets").read_text()) == 2


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"turn_timeout_s": 1.0}, r"took longer than environment\.turn_timeout_s 1 at [^ ]*game\.py:15"),
        (
            {"turn_timeout_s": 90.0, "episode_timeout_s": 1.0},
            r"took longer than environment\.episode_timeout_s 1 at [^ ]*game\.py:15",
        ),
    ],
)
def test_a_step_that_hangs_is_told_with_its_limit_and_the_place_in_the_users_file(
    limits: dict[str, float], said: str, play: Play
) -> None:
    with pytest.raises(RewardFailed, match=said):
        play("time.sleep(20)", **limits)


def test_a_row_without_an_answer_gives_none_that_could_fit_anything(
    tmp_path: Path, prompts: PromptBatch, adapter: AdapterVersion
) -> None:
    (tmp_path / "game.py").write_text(GAME.format(body="pass", restore="pass"))
    row = Prompt(0, 0, "2 + 2?", "", [4, 5, 6], 70, {"question": "2 + 2?", "level": 3})
    file = record_of(write_json_lines(path_of(prompts.file), [row._asdict()]))
    config = PlayedEnvironment(name=f"{tmp_path / 'game.py'}:Game", workers=1, max_failed_frac=0.0)
    with pytest.raises(RewardFailed, match=r"the task has no 'answer'; it has question, level\W* at [^ ]*game\.py:10"):
        roll_out.fn(ENGINE, SAMPLING, prompts.model_copy(update={"file": file}), adapter, None, config)


def test_the_methods_of_a_game_may_be_async(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GAME", GAME.replace("    def ", "    async def ").replace("import os", "import asyncio, os"))
    _, samples, _ = play("await asyncio.sleep(0.01)")
    assert [(sample.reward, sample.num_turns) for sample in samples] == [(1.0, 3)] * 4


def test_what_gymnasiums_methods_return_is_understood_and_truncated_ends_an_episode(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gymnasium = GAME.replace('"</say>"\n', '"</say>", dict(seed=0)\n')
    monkeypatch.setitem(globals(), "GAME", of_gymnasium)
    _, samples, _ = play('return "x", 0.5, False, self.turn == 2, {}')
    assert [(sample.reward, sample.num_turns) for sample in samples] == [(1.0, 2)] * 4


def test_a_step_that_hangs_fails_the_episode_in_its_time(play: Play) -> None:
    _, samples, _ = play("time.sleep(60 if self.task['answer'] == '1' else 0)", turn_timeout_s=3.0, max_failed_frac=0.5)
    assert [sample.unjudged for sample in samples] == ["", "", "environment failed", "environment failed"]


def test_after_a_kill_no_complete_turn_is_sampled_again_and_the_trajectories_are_the_undisturbed_ones(
    play: Play, prompts: PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, undisturbed, _ = play()
    StepFolder.of(prompts).samples_inputs.unlink()
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)
        with pytest.raises(EngineUnavailable):
            play(max_failed_frac=0.0)
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        record, samples, measures = play()
    assert len(asked) == record.num_turns - 5
    assert measures["num_kept_turns"] + 3 * measures["num_kept"] == 5
    assert [trajectory_of(s).sha256 for s in samples] == [trajectory_of(s).sha256 for s in undisturbed]
    assert samples == undisturbed
    assert not StepFolder.of(prompts).turns_journal.exists()


def test_an_environment_that_restarts_plays_again_and_the_turns_count_as_lost(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(2, patch)
        with pytest.raises(EngineUnavailable):
            play(restore='restore = "restart"')
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        _, samples, measures = play(restore='restore = "restart"')
    assert len(asked) == 12
    assert (measures["num_lost_turns"], measures["num_kept_turns"]) == (2, 0)
    assert [sample.reward for sample in samples] == [1.0] * 4


def test_other_observations_than_those_on_record_fail_the_episode(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "word").write_text("one")
    body = 'return "<say>%s</say>" % open(HERE + "/word").read(), 1.0, self.turn == 3'
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)  # in the second episode, after two turns
        with pytest.raises(EngineUnavailable):
            play(body, workers=1)
    (tmp_path / "word").write_text("other")
    with pytest.raises(RewardFailed, match="its observations differ from those on record"):
        play(body, workers=1)


def test_another_environment_gets_nothing_of_an_earlier_one(
    play: Play, prompts: PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(5, patch)
        with pytest.raises(EngineUnavailable):
            play()
    _, _, measures = play(max_observation_tokens=64)
    assert (measures["num_kept"], measures["num_kept_turns"]) == (0, 0)
    assert list(StepFolder.of(prompts).path.glob("turns.journal.aside-*"))


def test_episodes_that_two_states_of_an_environment_have_played_are_not_mixed(
    play: Play, tmp_path: Path, prompts: PromptBatch
) -> None:
    body = "open(__file__, 'a').write('MORE = 1\\n') if self.task['answer'] == '1' and self.turn == 2 else None"
    with pytest.raises(RewardFailed, match=r"Game' have changed while its episodes were played.*run the same again"):
        play(body)
    assert [path.name for path in StepFolder.of(prompts).path.glob("episodes*.aside-*")] == ["episodes.journal.aside-0"]
    assert not (StepFolder.of(prompts).samples).exists()
    _, samples, measures = play()
    assert [sample.reward for sample in samples] == [1.0] * 4 and measures["num_kept"] == 0


def test_wrong_turns_are_quarantined(play: Play, prompts: PromptBatch, workspace: Path) -> None:
    (workspace / "fault").write_text("NaN")
    with pytest.raises(WrongAnswer, match="log-probability nan"):
        play()
    assert list(StepFolder.of(prompts).path.glob("turns.journal.aside-*"))


def test_an_agent_gets_a_client_and_returns_its_reward(tmp_path: Path, prompts: PromptBatch, adapter: AdapterVersion) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "async def run(task, client):\n"
        "    messages = [{'role': 'user', 'content': '<say>' + task['answer'] + '</say>'}]\n"
        "    answer = await client.chat(messages)\n"
        "    messages += [answer, {'role': 'user', 'content': 'more'}]\n"
        "    await client.chat(messages)\n"
        "    return {'right': float(answer['content'] == task['answer'])}\n"
    )
    config = PlayedEnvironment(name=f"{path}:run", workers=2, max_failed_frac=0.0)
    record = roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, config)
    samples = read_samples(path_of(record.file))
    assert [(s.num_turns, s.reward, s.reward_parts) for s in samples] == [(2, 1.0, {"right": 1.0})] * 4


AGENT = """
import asyncio
from infra.environments.runner import LimitReached

async def run(task, client):
    messages, num = [{"role": "user", "content": "<say>0</say>"}], 0
    {begin}
    while num < 9:
        messages += [await client.chat(messages), {"role": "user", "content": "<say>more</say>"}]
        num += 1
    return num

async def catches(task, client):
    try:
        return await run(task, client)
    except LimitReached as error:
        return {"reward": 0.5} if str(error) == "max_turns" else None
"""


@pytest.fixture
def agent(tmp_path: Path, prompts: PromptBatch, adapter: AdapterVersion) -> Callable[..., list[Sample]]:
    """Roll out with an agent: its function, and a line before its turns."""

    def made(function: str, begin: str = "pass", **limits: Any) -> list[Sample]:
        (tmp_path / "agent.py").write_text(AGENT.replace("{begin}", begin))
        fields = {"name": f"{tmp_path}/agent.py:{function}", "workers": 2, "max_failed_frac": 0.0}
        config = PlayedEnvironment.model_validate(fields | limits)
        return read_samples(path_of(roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, config).file))

    return made


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            {"turn_timeout_s": 5},
            r"environment\.turn_timeout_s 5 has no effect with '[^']*agent\.py:run': an agent has no calls of reset",
        ),
        (
            {"max_observation_tokens": 64},
            r"environment\.max_observation_tokens 64 has no effect .* an agent writes its own messages",
        ),
    ],
)
def test_a_limit_that_an_agent_does_not_have_is_refused_before_its_first_turn(
    limits: dict[str, float], said: str, agent: Callable[..., list[Sample]]
) -> None:
    with pytest.raises(ValueError, match=said):
        agent("run", "raise RuntimeError('begun')", **limits)


PARALLEL = """
import asyncio
from infra.environments.runner import LimitReached

async def run(task, client):
    asked = [client.chat([{"role": "user", "content": f"<say>{number}</say>"}]) for number in range(6)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    return float(sum(isinstance(each, LimitReached) for each in found))
"""


def test_an_agent_that_asks_in_parallel_gets_no_more_than_its_turns(
    tmp_path: Path, prompts: PromptBatch, adapter: AdapterVersion
) -> None:
    (tmp_path / "parallel.py").write_text(PARALLEL)
    config = PlayedEnvironment(name=f"{tmp_path}/parallel.py:run", workers=2, max_turns=4, max_failed_frac=0.0)
    samples = read_samples(path_of(roll_out.fn(ENGINE, SAMPLING, prompts, adapter, None, config).file))
    by_episode = Counter((each.prompt_id, each.sample_index) for each in samples)
    assert set(by_episode.values()) == {4}  # each of the conversations is a trajectory
    assert {each.reward for each in samples} == {2.0}


def test_an_agent_gets_no_more_than_its_turns_and_may_still_return_a_reward(agent: Callable[..., list[Sample]]) -> None:
    samples = agent("catches", max_turns=3)
    assert {(s.num_turns, s.reward, s.stop_reason, s.is_truncated) for s in samples} == {(3, 0.5, "max_turns", True)}


@pytest.mark.parametrize(
    ("begin", "limits", "said"),
    [
        (
            "pass",
            {"max_turns": 3},
            r"the episode ended by environment\.max_turns before run .* raise environment\.max_turns, or catch",
        ),
        ("messages[0]['content'] = 'x ' * 3000", {}, r"the episode ended by engine\.max_context_tokens before run"),
        ("await asyncio.sleep(60)", {"episode_timeout_s": 1}, r"run was not done after environment\.episode_timeout_s 1, for"),
        ("raise TimeoutError('no board')", {}, r"raised TimeoutError: no board at [^ ]*agent\.py:7"),
    ],
)
def test_an_agent_that_a_limit_ends_before_its_reward_has_failed_by_the_name_of_the_limit(
    begin: str, limits: dict[str, int], said: str, agent: Callable[..., list[Sample]]
) -> None:
    with pytest.raises(RewardFailed, match=f"failed in 4 of 4 episodes.*{said}"):
        agent("run", begin, **limits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Game:\n    def reset(self, task): return 'x'\n",
            "^environment '[^']*bad.py:Game' is no class with reset.*client[)]$",
        ),
        (
            "class Game:\n    restore = 'later'\n    reset = step = lambda *a: 1\n",
            "restore 'later', must be 'replay', 'restart' or 'snapshot'",
        ),
        ("import nothing_of_that_name\n", "^environment '[^']*bad.py:Game' cannot be imported: No module .*bad.py:1$"),
        ("class Game:\n    def reset(self) return 1\n", "^environment '[^']*' cannot be imported: SyntaxError.*"),
        (
            "class Game:\n    def __init__(self, size): ...\n    reset = step = lambda *a: 1\n",
            r"cannot be called as Game\(\), with nothing else: missing a required argument: 'size'$",
        ),
        (
            "class Game:\n    def reset(self): ...\n    def step(self, action): ...\n",
            r"cannot be called as reset\(self, task\), with nothing else: too many positional arguments$",
        ),
        (
            "class Game:\n    @staticmethod\n    def reset(task): ...\n    def step(self, action, turn): ...\n",
            r"cannot be called as step\(self, action\), with nothing else: missing a required argument: 'turn'$",
        ),
        (
            "async def Game(task): ...\n",
            r"cannot be called as Game\(task, client\), with nothing else: too many positional arguments$",
        ),
        (
            "class Gaem:\n    reset = step = None\n",
            "^environment '[^']*' does not exist; the nearest is Gaem; functions and classes there: Gaem$",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, workspace: Path
) -> None:
    (tmp_path / "bad.py").write_text(text)
    config = PlayedEnvironment(name=f"{tmp_path}/bad.py:Game", max_failed_frac=0.0)
    with pytest.raises(ValueError, match=message) as caught:
        playing.check(config, "digest")
    assert "\n" not in str(caught.value)
    client.close_all()


def test_a_long_observation_is_cut_in_its_middle(play: Play) -> None:
    body = 'return "begin " + "word " * 400 + "end", 1.0, self.turn == 3'
    _, samples, _ = play(body, max_observation_tokens=20)
    given = samples[0].segments[2].num_tokens
    assert given < 60
    assert "begin" in samples[0].text and "[...]" in samples[0].text and "end" in samples[0].text


DIES_IN_TURN_2 = (
    "self.turn == 2 and not os.path.exists(HERE + '/died') and (open(HERE + '/died', 'w'), os.kill(os.getpid(), signal.SIGKILL))"
)


def test_an_environment_whose_worker_is_killed_goes_on_with_the_turns_on_record(
    play: Play, prompts: PromptBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        _, samples, measures = play(DIES_IN_TURN_2)
    assert (tmp_path / "died").exists()
    assert len(asked) == 12 and measures["num_kept_turns"] == 2
    StepFolder.of(prompts).samples_inputs.unlink()
    _, undisturbed, _ = play(DIES_IN_TURN_2)
    assert samples == undisturbed


def test_an_environment_that_restarts_loses_the_turns_of_a_worker_that_is_killed(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        asked = engine_dies_at(99, patch)
        _, samples, measures = play(DIES_IN_TURN_2, restore='restore = "restart"')
    assert len(asked) == 14
    assert (measures["num_lost_turns"], measures["num_kept_turns"]) == (2, 0)
    assert [(sample.reward, sample.num_turns) for sample in samples] == [(1.0, 3)] * 4


def test_episodes_are_played_side_by_side_also_after_many_checks_of_their_environment(play: Play, tmp_path: Path) -> None:
    """Each step begins with a check that takes no time; a worker that was quick with it must not get several episodes at once."""
    all_are_under_way = "len(open(HERE + '/steps').read()) >= 4"
    body = (
        "until = time.monotonic() + 20\n"
        f"        while not {all_are_under_way} and time.monotonic() < until: time.sleep(0.01)\n"
        f"        assert {all_are_under_way}, 'it played alone'"
    )
    path = tmp_path / "game.py"
    path.write_text(GAME.format(body=body, restore="pass"))
    config = PlayedEnvironment(name=f"{path}:Game", workers=4, max_failed_frac=0.0)
    for _ in range(4):
        playing.check(config, source_of(config))
    _, samples, _ = play(body, workers=4)
    assert [sample.reward for sample in samples] == [1.0] * 4
