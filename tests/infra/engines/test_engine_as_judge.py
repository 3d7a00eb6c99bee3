"""The run's own engine as the judge: asked as the base model, checked like any rollout, and nothing of an engine that answers wrongly is used."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from shared import sample

from infra.concurrency.deadline import Deadline
from infra.config import EngineConfig, JudgeConfig, RewardConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import RolloutRequest
from infra.engines.scripted import ScriptedEngine
from infra.failures import WrongAnswer
from infra.records import AdapterVersion
from infra.rewards.judges.cases import LATE, JudgeAnswer, JudgeAway, JudgeRequest
from infra.rewards.judges.ledger import Ledger
from infra.rewards.outcome import JUDGE_UNAVAILABLE, JUDGE_UNREADABLE, TIME_OUT
from infra.runs.foreign_adapters import folders, judge_adapter
from infra.store.files import write, write_json
from infra.store.samples import Sample
from tasks.rewards import by_engine
from tasks.rewards.apply import judged
from tasks.rewards.by_engine import asker, base_of
from tasks.rewards.by_model import JudgedWork

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
Logprob = Callable[[list[int], str | None], float]
JUDGE = JudgeConfig.model_validate(
    {"by": "engine", "rubric": "{completion}", "score_pattern": r"#### (\d+)", "max_score": 99, "max_output_tokens": 16}
)
REWARD = RewardConfig(name="rubric", judge=JUDGE, max_unjudged_frac=0.9)
PROMPTS = [Prompt(0, 0, "2 + 2?", "4", [1], 0)]


@pytest.fixture(params=["scripted", "sglang", "vllm"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig, over_scripted_server: None) -> EngineConfig:
    return engine_config.but(kind=request.param)


def requests(num: int) -> list[JudgeRequest]:
    return [JudgeRequest([{"role": "user", "content": f"{n}?"}], None, f"{n:064x}") for n in range(num)]


def test_the_base_model_answers_each_request_and_the_adapter_can_be_served_again(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    found: dict[int, JudgeAnswer | JudgeAway] = {}
    asker(config, adapter, JUDGE)(requests(3), found.__setitem__)
    assert sorted(found) == [0, 1, 2]
    assert all(isinstance(each, JudgeAnswer) and each.input_tokens and each.output_tokens for each in found.values())
    assert engine.program.served_adapters() == ()  # type: ignore[attr-defined]
    engine.load_adapter(adapter)
    assert engine.program.served_adapters() == (adapter.served_name,)  # type: ignore[attr-defined]
    engine.stop()


def test_nothing_of_an_engine_that_answers_wrongly_is_used(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    adapter = scripted_adapter(1)
    open_engine(config, adapter).wake()
    asker(config, adapter, JUDGE)(requests(1), lambda number, found: None)  # the golden reference of a sound engine
    set_fault("NaN")
    found: list[int] = []
    with pytest.raises(WrongAnswer):
        asker(config, adapter, JUDGE)(requests(3), lambda number, answer: found.append(number))
    assert found == []
    open_engine(config, adapter).stop()


def test_at_the_deadline_requests_under_way_are_aborted_and_are_late(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, config = scripted_adapter(1), config.but(max_running_requests=1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(base_of(adapter))
    set_fault("slow")
    answer = ScriptedEngine.answer
    monkeypatch.setattr(ScriptedEngine, "answer", lambda *inputs: (time.sleep(0.1), answer(*inputs))[1])
    found: dict[int, JudgeAnswer | JudgeAway] = {}
    deadline = Deadline(1.5).begin()
    began = time.monotonic()
    asker(config, adapter, JUDGE, deadline)(requests(40), found.__setitem__)
    assert time.monotonic() - began >= 1.5 and sorted(found) == [*range(40)]
    num_late = sum(each == LATE for each in found.values())
    assert 0 < num_late < 40 and num_late + sum(isinstance(each, JudgeAnswer) for each in found.values()) == 40
    set_fault("")
    monkeypatch.setattr(ScriptedEngine, "answer", answer)
    found.clear()
    asker(config, adapter, JUDGE)(requests(3), found.__setitem__)
    assert all(isinstance(each, JudgeAnswer) for each in found.values()), "the engine works on"
    found.clear()
    monkeypatch.setattr(by_engine, "open_engine", lambda *inputs: pytest.fail("nothing is asked, so nothing is loaded"))
    asker(config, adapter, JUDGE, deadline)(requests(3), found.__setitem__)
    assert [found[n] for n in range(3)] == [LATE] * 3
    engine.stop()


def test_what_the_engine_was_too_late_for_is_unjudged_by_the_time_and_asked_again_later(
    workspace: Path, engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    config, adapter, samples = engine_config.but(kind="scripted"), scripted_adapter(1), samples_of(12)
    reward, over = REWARD.but(max_unjudged_frac=1.0), Deadline(1e-6).begin()
    work = JudgedWork("r", "step 0", workspace / "judgements.jsonl", base_sha256=adapter.base.sha256)
    asked = work._replace(ask=asker(config, adapter, JUDGE, over))
    for each in (asked, work):  # the engine's task, then the scoring, which asks no engine
        found = judged(reward, samples, PROMPTS, workspace / "j", {}, work=each, deadline=over)
        assert {(each.reward, each.unjudged) for each in found} == {(None, TIME_OUT)}
    later = judged(reward, samples, PROMPTS, workspace / "j", {}, work=work._replace(ask=asker(config, adapter, JUDGE)))
    assert any(each.reward is not None for each in later) and TIME_OUT not in {each.unjudged for each in later}
    open_engine(config, adapter).stop()


def write_weights(folder: Path, value: int) -> None:
    weights = {"base_model.model.lora_A.weight": np.full((4, 2), value, np.float32)}
    write(folder / "adapter_model.safetensors", safetensors.numpy.save(weights))


@pytest.fixture
def judge(
    scripted_adapter: MakeAdapter, scripted_logprob: Logprob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> JudgeConfig:
    """By an adapter, whose canary says what the scripted servers say of it."""
    (tmp_path / "folder").mkdir()
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    write_json(tmp_path / "folder/adapter_config.json", about)
    write_weights(tmp_path / "folder", 1)

    def write_canary(folder: Path, out: Path, *others: object) -> None:
        served = str(folder).removesuffix(".partial")
        tokens = [5, 6, 7, 8, 9, 10]
        base, judge = ([scripted_logprob(tokens[:n], path) for n in range(1, len(tokens))] for path in (None, served))
        write_json(out, {"tokens": tokens, "base_logprobs": base, "adapter_logprobs": judge})

    monkeypatch.setattr(folders, "write_canary", write_canary)
    return JUDGE.but(adapter=str(tmp_path / "folder"))


def test_an_adapter_that_judges_is_served_under_its_own_name_by_the_same_engine(
    config: EngineConfig, scripted_adapter: MakeAdapter, judge: JudgeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    asked: list[RolloutRequest] = []
    sample_all = by_engine.sample_all
    monkeypatch.setattr(by_engine, "sample_all", lambda engine, request: (asked.append(request), sample_all(engine, request))[1])
    launch, found = engine.program.launch, dict[int, JudgeAnswer | JudgeAway]()  # type: ignore[attr-defined]
    asker(config, adapter, judge)(requests(3), found.__setitem__)
    judging = judge_adapter.prepared(judge, adapter.base)
    assert [each.adapter for each in asked] == [judging] and all(isinstance(each, JudgeAnswer) for each in found.values())
    assert engine.program.served_adapters() == (judging.served_name,)  # type: ignore[attr-defined]
    assert judging.served_name and judging.served_name.startswith("judge-") and judging.sha256[:12] in judging.served_name
    engine.load_adapter(adapter)
    assert engine.program.served_adapters() == (adapter.served_name,)  # type: ignore[attr-defined]
    assert engine.program.launch == launch, "it was not launched again"  # type: ignore[attr-defined]
    engine.stop()


@pytest.mark.parametrize("fault", ["forgets the adapter", "serves an old adapter", "garbage"])
def test_nothing_of_an_engine_that_judges_by_something_else_is_used(
    config: EngineConfig, scripted_adapter: MakeAdapter, judge: JudgeConfig, set_fault: SetFault, fault: str
) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    set_fault(fault)
    found: list[int] = []
    with pytest.raises(WrongAnswer):
        asker(config, adapter, judge)(requests(3), lambda number, answer: found.append(number))
    assert found == []
    set_fault("")
    open_engine(config, adapter).stop()


def test_answers_of_one_judge_are_not_those_of_another(
    workspace: Path, engine_config: EngineConfig, scripted_adapter: MakeAdapter, judge: JudgeConfig
) -> None:
    config, adapter, samples = engine_config.but(kind="scripted"), scripted_adapter(1), samples_of(4)
    work = JudgedWork("r", "step 0", workspace / "judgements.jsonl", base_sha256=adapter.base.sha256)

    def num_requests(judge: JudgeConfig) -> int:
        with_engine, reward = work._replace(ask=asker(config, adapter, judge)), REWARD.but(judge=judge, max_unjudged_frac=1.0)
        with Ledger() as ledger:
            before = ledger.spent("r").requests
            judged(reward, samples, PROMPTS, workspace / "j", {}, work=with_engine)
            return ledger.spent("r").requests - before

    assert [num_requests(each) for each in (JUDGE, judge)] == [4, 4]
    write_weights(Path(judge.adapter), 2)
    assert num_requests(judge) == 4
    open_engine(config, adapter).stop()


def samples_of(num: int) -> list[Sample]:
    return [replace(sample(prompt_id=0), sample_index=n, text=f"answer {n}") for n in range(num)]


def test_the_engine_fills_the_ledger_and_the_scoring_needs_no_engine(
    workspace: Path, engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, adapter, samples = engine_config.but(kind="scripted"), scripted_adapter(1), samples_of(12)
    work = JudgedWork("r", "step 0", workspace / "judgements.jsonl", base_sha256=adapter.base.sha256)
    with_engine = work._replace(ask=asker(config, adapter, JUDGE))
    first = judged(REWARD, samples, PROMPTS, workspace / "j", {}, work=with_engine)
    open_engine(config, adapter).stop()
    assert judged(REWARD, samples, PROMPTS, workspace / "j", {}, work=work) == first
    assert any(each.reward is not None for each in first) and {each.unjudged for each in first} <= {"", JUDGE_UNREADABLE}
    with Ledger() as ledger:
        assert ledger.spent("r").requests == 12
    other = judged(REWARD.but(max_unjudged_frac=1.0), samples_of(13), PROMPTS, workspace / "j", {}, work=work)
    assert other[:12] == first and other[12].unjudged == JUDGE_UNAVAILABLE


def test_a_prompt_that_is_too_long_for_the_engine_costs_its_own_sample(
    workspace: Path, engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    config, adapter = engine_config.but(kind="scripted"), scripted_adapter(1)
    long = [replace(samples_of(1)[0], text="word " * 400), *samples_of(12)[1:]]
    work = JudgedWork("r", "step 0", workspace / "judgements.jsonl", asker(config, adapter, JUDGE), adapter.base.sha256)
    found = judged(REWARD, long, PROMPTS, workspace / "j", {}, work=work)
    assert found[0].unjudged == JUDGE_UNAVAILABLE and JUDGE_UNAVAILABLE not in {each.unjudged for each in found[1:]}
    assert "are more than engine.max_context_tokens 128" in (workspace / "judgements.jsonl").read_text()
    open_engine(config, adapter).stop()
