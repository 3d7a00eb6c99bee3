"""The server of a second model that judges: its turns with the engine, its checks at each wake, and its records, beside the engine's."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from shared import is_gone, sample

from infra import engines
from infra.colocation.judge_section import server_of
from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import EngineConfig, JudgeConfig, RewardConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine, open_judge
from infra.engines.server import server_process
from infra.engines.server.judge_engine import JudgeEngine
from infra.failures import EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion
from infra.rewards.judges.cases import LATE, JudgeAnswer, JudgeAway, JudgeRequest, OnAnswer
from infra.store.layout import JUDGE, Workspace
from tasks.rewards import by_model
from tasks.rewards.by_judge_server import judge_awake, version_of
from tasks.rewards.by_model import JudgedWork

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
pytestmark = pytest.mark.usefixtures("over_scripted_server")


@pytest.fixture
def judge(random_tiny: Path) -> JudgeConfig:
    how = {"by": "model", "model": str(random_tiny), "rubric": "{completion}", "max_output_tokens": 16}
    return JudgeConfig.model_validate(how | {"server": {"max_context_tokens": 128, "colocation": "reload"}})


@pytest.fixture
def config(engine_config: EngineConfig) -> EngineConfig:
    return engine_config.but(kind="sglang", colocation="reload")


def opened(config: EngineConfig, judge: JudgeConfig) -> JudgeEngine:
    return open_judge(server_of(config, judge), version_of(judge, "r"))


def judged(
    config: EngineConfig, judge: JudgeConfig, num: int = 3, deadline: Deadline = NO_DEADLINE
) -> list[JudgeAnswer | JudgeAway]:
    found: dict[int, JudgeAnswer | JudgeAway] = {}
    requests = [JudgeRequest([{"role": "user", "content": f"{n}?"}], None, f"{n:064x}") for n in range(num)]
    with judge_awake(config, judge, "r", deadline) as ask:
        ask(requests, found.__setitem__)
    return [found[n] for n in range(num)]


def asked_of(url: str) -> None:
    """Have a server answer, as a program would that does not know that it sleeps."""
    headers, body = server_process.authorization(url), {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    httpx.post(f"{url}/continue_generation", json={}, headers=headers, timeout=60).raise_for_status()
    httpx.post(f"{url}/generate", json=body, headers=headers, timeout=60).raise_for_status()


def test_judge_and_engine_take_turns_each_with_a_server_and_records_of_its_own(
    config: EngineConfig, judge: JudgeConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    adapter, its = scripted_adapter(1), opened(config, judge)
    assert not its.is_asleep()
    its.start_asleep()
    assert its.is_asleep() and engines.log_path() == workspace / "logs/judge-0001.log"
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    of_engine, of_judge = server_process.recorded(), server_process.recorded(JUDGE)
    assert of_engine and of_judge and of_engine.url != of_judge.url and of_engine.is_awake and not of_judge.is_awake
    assert server_process.authorization(of_engine.url) != server_process.authorization(of_judge.url)
    engine.release_memory()
    assert all(isinstance(each, JudgeAnswer) and each.output_tokens for each in judged(config, judge))
    assert its.is_asleep() and server_process.recorded(JUDGE).launch == of_judge.launch, "woken, not started again"  # type: ignore[union-attr]
    engine.wake()
    engine.load_adapter(adapter)
    assert server_process.recorded().launch == of_engine.launch, "the engine has not ended the judge's server, nor its own"  # type: ignore[union-attr]
    assert [state.replica for state in engines.recorded()] == [0, JUDGE]
    assert engines.stop_recorded() and is_gone(of_judge.process.pid) and is_gone(of_engine.process.pid)
    assert not Workspace.here().judge_state.exists() and not Workspace.here().judge_key.exists()


def test_a_judge_that_answers_while_it_should_sleep_is_ended(config: EngineConfig, judge: JudgeConfig) -> None:
    its = opened(config, judge)
    its.start_asleep()
    state = server_process.recorded(JUDGE)
    assert state
    asked_of(state.url)
    with pytest.raises(WrongAnswer, match="the judge's server answered 1 requests while it should sleep"):
        its.is_asleep()
    assert is_gone(state.process.pid)


def test_a_judge_that_answered_in_its_sleep_gives_no_judgement(config: EngineConfig, judge: JudgeConfig) -> None:
    opened(config, judge).start_asleep()
    asked_of(server_process.recorded(JUDGE).url)  # type: ignore[union-attr]
    with pytest.raises(WrongAnswer, match="while it should sleep"):
        judged(config, judge)


def test_a_judge_whose_weights_changed_in_its_sleep_gives_no_judgement(
    config: EngineConfig, judge: JudgeConfig, set_fault: SetFault
) -> None:
    assert len(judged(config, judge)) == 3
    set_fault("garbage")
    state = server_process.recorded(JUDGE)
    with pytest.raises(WrongAnswer, match="golden check"):
        judged(config, judge)
    assert state and is_gone(state.process.pid)


def test_a_judge_that_was_killed_in_its_sleep_is_started_again(config: EngineConfig, judge: JudgeConfig) -> None:
    first, state = judged(config, judge), server_process.recorded(JUDGE)
    assert state
    os.kill(state.process.pid, signal.SIGKILL)
    its = opened(config, judge)
    assert not its.is_asleep()
    its.start_asleep()
    assert judged(config, judge) == first and server_process.recorded(JUDGE).launch == state.launch + 1  # type: ignore[union-attr]


def test_a_judge_that_is_ending_while_it_is_asked_whether_it_sleeps_is_not_asleep(
    config: EngineConfig, judge: JudgeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process counts as alive until its memory is freed, and resets its connections meanwhile."""
    first, state = judged(config, judge), server_process.recorded(JUDGE)
    assert state
    its, metrics_of = opened(config, judge), server_process.metrics_of

    def killed_at_the_call(url: str, timeout_s: float) -> list[str]:
        os.kill(state.process.pid, signal.SIGKILL)
        return metrics_of(url, timeout_s)

    with monkeypatch.context() as patched:
        patched.setattr(server_process, "metrics_of", killed_at_the_call)
        assert not its.is_asleep()
    its.start_asleep()
    assert judged(config, judge) == first and server_process.recorded(JUDGE).launch == state.launch + 1  # type: ignore[union-attr]


def test_a_judge_that_hangs_is_unavailable_and_ended(config: EngineConfig, judge: JudgeConfig, set_fault: SetFault) -> None:
    slow = config.but(request_timeout_s=1)
    opened(slow, judge).start_asleep()
    state = server_process.recorded(JUDGE)
    assert state
    with judge_awake(slow, judge, "r") as ask:
        ask([JudgeRequest([{"role": "user", "content": "?"}], None, f"{1:064x}")], lambda number, found: None)
        set_fault("hangs after 1")
        with pytest.raises(EngineUnavailable):
            ask([JudgeRequest([{"role": "user", "content": "!"}], None, f"{2:064x}")], lambda number, found: None)
    assert is_gone(state.process.pid)


def test_by_plan_restart_its_server_lives_only_while_it_judges(config: EngineConfig, judge: JudgeConfig) -> None:
    restarted = judge.but(server=judge.server.but(colocation="restart"))
    opened(config, restarted).start_asleep()
    assert server_process.recorded(JUDGE) is None
    assert len(judged(config, restarted)) == 3
    assert server_process.recorded(JUDGE) is None


def test_a_prompt_that_is_too_long_names_the_judges_own_limit(config: EngineConfig, judge: JudgeConfig) -> None:
    found: list[JudgeAnswer | JudgeAway] = []
    with judge_awake(config, judge, "r") as ask:
        ask([JudgeRequest([{"role": "user", "content": "word " * 200}], None, "0" * 64)], lambda number, each: found.append(each))
    (away,) = found
    assert isinstance(away, JudgeAway) and "are more than reward.judge.server.max_context_tokens 128" in away.message
    assert server_process.recorded(JUDGE) is None, "it was not started for nothing"


def test_another_model_is_another_judge_and_none_is_paid_twice(judge: JudgeConfig, workspace: Path) -> None:
    reward = RewardConfig(name="rubric", judge=judge.but(score_pattern="(1)"), max_unjudged_frac=1.0)
    samples, prompts, asked = [replace(sample(prompt_id=0), text="a")], [Prompt(0, 0, "2 + 2?", "4", [1], 0)], list[str]()

    def ask(requests: Sequence[JudgeRequest], on_answer: OnAnswer) -> None:
        for number, request in enumerate(requests):
            asked.append(request.key)
            on_answer(number, JudgeAnswer("1", "stop", 3, 1))

    for sha256 in ("a" * 64, "b" * 64, "a" * 64):
        work = JudgedWork("r", "step 0", workspace / "judgements.jsonl", ask, sha256)
        by_model.judge(reward, "rubric", samples, prompts, lambda index, outcome: None, work)
    assert len(asked) == len(set(asked)) == 2


def test_a_judge_whose_time_is_over_is_not_woken_and_its_samples_are_late(config: EngineConfig, judge: JudgeConfig) -> None:
    opened(config, judge).start_asleep()
    over = Deadline(0.001).begin()
    while not over.is_over:
        pass
    assert judged(config, judge, 3, over) == [LATE] * 3
    assert opened(config, judge).is_asleep()
    assert all(isinstance(each, JudgeAnswer) for each in judged(config, judge)), "the same command asks again"
