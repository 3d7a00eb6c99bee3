"""What every engine does; a new one is done when these pass with it.

`sglang` and `vllm` here run against scripted servers; tests/test_end_to_end.py has the real SGLang, tests/gpu/compare_engines.py
the real vLLM.
"""

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.checked import CheckedEngine
from infra.engines.interface import Engine, RolloutRequest, SampleSink, TurnRequest
from infra.engines.journal import Journal
from infra.engines.server import server_process
from infra.failures import EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion
from infra.store.samples import Sample

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(3)
]
SAMPLING = SamplingConfig(group_size=4, max_output_tokens=8)


@pytest.fixture(params=["scripted", "sglang", "vllm"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig, over_scripted_server: None) -> EngineConfig:
    return engine_config.but(kind=request.param)


def test_each_prompt_gets_its_group_in_order(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    adapter = scripted_adapter(1)
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    begin = time.time()
    samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert [(sample.prompt_id, sample.sample_index) for sample in samples] == [(p, g) for p in range(3) for g in range(4)]
    assert all(sample.adapter_version == 1 and sample.adapter_sha256 == adapter.sha256 for sample in samples)
    assert all(0 < len(sample.output_tokens) == len(sample.output_logprobs) for sample in samples)
    if config.kind != "scripted":  # which answers without a server
        assert 0 < how.ttft_s < how.last_token_at - begin
        assert begin < how.first_token_at < how.last_token_at < time.time()
    engine.stop()


def test_the_interface_says_how_much_room_and_memory_an_engine_has(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = ready(config, scripted_adapter(1))
    is_server = config.kind != "scripted"  # which has no KV cache and no processes
    assert (engine.kv_cache_tokens > 0, engine.memory_in_use_gib() > 0) == (is_server, is_server)
    engine.stop()
    assert (engine.kv_cache_tokens, engine.memory_in_use_gib()) == (0, 0)


def test_equal_seeds_give_equal_samples_and_members_of_a_group_differ(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    base = scripted_adapter(0)
    engine = open_engine(config, base)
    engine.wake()
    engine.load_adapter(base)
    first, second = (engine.generate(RolloutRequest(PROMPTS, SAMPLING, base))[0] for _ in range(2))
    assert first == second
    assert len({(*sample.output_tokens, *sample.output_logprobs) for sample in first[:4]}) == 4
    engine.stop()


def test_a_sample_of_an_adapter_that_is_not_served_is_refused(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = open_engine(config, scripted_adapter(0))
    engine.wake()
    engine.load_adapter(scripted_adapter(1))
    with pytest.raises(WrongAnswer, match="asked for"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(2)))
    engine.load_adapter(scripted_adapter(2))
    engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(2)))
    engine.stop()


async def turns_of(engine: Engine, adapter: AdapterVersion, seeds: list[int]) -> list[Sample]:
    async with engine.turns(adapter) as turns:
        requests = [TurnRequest(7, 1, [4, 5, 6], seed, 1.0, 8) for seed in seeds]
        samples = await asyncio.gather(*(turns.sample(request) for request in requests))
        assert turns.num_prompt_tokens == 3 * len(seeds)
        return samples


def test_turns_are_sampled_by_the_adapter_that_is_asked_for(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)
    first, second, again = asyncio.run(turns_of(engine, adapter, [70, 71, 70]))
    assert first == again
    assert (*first.output_tokens, *first.output_logprobs) != (*second.output_tokens, *second.output_logprobs)
    assert (first.prompt_id, first.sample_index, list(first.prompt_tokens)) == (7, 1, [4, 5, 6])
    assert (first.adapter_version, first.adapter_sha256) == (1, adapter.sha256)
    with pytest.raises(WrongAnswer, match="asked for"):
        asyncio.run(turns_of(engine, scripted_adapter(2), [70]))
    engine.stop()


def test_each_turn_names_its_adapter(
    over_scripted_server: None,
    engine_config: EngineConfig,
    scripted_adapter: MakeAdapter,
    scripted_logprob: Callable[[list[int], str | None], float],
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind="sglang"), adapter)
    (turn,) = asyncio.run(turns_of(engine, adapter, [70]))
    tokens = [4, 5, 6, *turn.output_tokens]
    assert list(turn.output_logprobs) == [scripted_logprob(tokens[:n], "000001") for n in range(3, len(tokens))]
    engine.stop()


@pytest.mark.parametrize("fault", ["NaN", "no output", "token out of the vocabulary", "forgets the adapter"])
def test_a_wrong_turn_or_a_lost_adapter_ends_the_engine(
    fault: str, over_scripted_server: None, engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind="sglang"), adapter)
    set_fault(fault)
    with pytest.raises(WrongAnswer):
        asyncio.run(turns_of(engine, adapter, [70]))
    assert server_process.recorded() is None


def test_waking_twice_costs_nothing_and_stopping_twice_is_no_error(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = open_engine(config, scripted_adapter(0))
    for _ in range(2):
        engine.wake()
    for _ in range(2):
        engine.stop()
    with pytest.raises(EngineUnavailable):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(0)))


def test_a_release_says_its_plan_and_reason_and_claims_nothing_on_a_cpu(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    engine = open_engine(config, scripted_adapter(0))
    engine.wake()
    release = engine.release_memory()
    assert (release.plan, release.released_bytes) == ("keep_weights", 0)
    assert release.reason
    engine.stop()


# What no engine may get past the border. `fault` is what the program behind it does, from a moment on.


def ready(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def test_an_engine_that_answers_garbage_after_a_wake_is_refused_each_time_until_it_is_sound(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    ready(config, scripted_adapter(0)).stop()
    set_fault("garbage")
    for _ in range(2):
        with pytest.raises(WrongAnswer, match="golden check"):
            ready(config, scripted_adapter(0))
    set_fault("")
    ready(config, scripted_adapter(0))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("forgets the adapter", "canary"),
        ("serves an old adapter", "canary"),
        ("stale prefix cache", "prefix cache"),
        ("garbage", "golden check"),
    ],
)
def test_an_engine_that_does_not_serve_the_new_adapter_is_refused(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str, message: str
) -> None:
    engine = ready(config, scripted_adapter(1))
    set_fault(fault)
    with pytest.raises(WrongAnswer, match=message) as caught:
        engine.load_adapter(scripted_adapter(2))
    assert caught.value.evidence
    with pytest.raises(EngineUnavailable):  # it was ended: no process adopts it as it is
        engine.load_adapter(scripted_adapter(2))
    set_fault("")
    ready(config, scripted_adapter(2)).generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(2)))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_adapter_that_was_checked_is_asked_for_again_at_the_end_of_a_rollout_and_not_before(
    engine_config: EngineConfig, over_scripted_server: None, scripted_adapter: MakeAdapter, set_fault: SetFault, kind: str
) -> None:
    config = engine_config.but(kind=kind)
    ready(config, scripted_adapter(1))
    set_fault("forgets the adapter")
    engine = ready(config, scripted_adapter(1))  # another task: nothing has changed, and nothing is asked
    with pytest.raises(WrongAnswer, match="canary"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(1)))


@pytest.mark.parametrize("is_beside", [True, False])
def test_the_base_model_is_asked_while_the_adapter_is_read_unless_both_are_timed(
    engine_config: EngineConfig,
    over_scripted_server: None,
    scripted_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    is_beside: bool,
) -> None:
    engine = ready(engine_config.but(kind="sglang"), scripted_adapter(0))
    assert isinstance(engine, CheckedEngine)
    engine.checks_beside = is_beside
    asked, load, check = threading.Event(), engine.program.load_adapter, engine._check_base
    was_asked = list[bool]()

    def slow(adapter: AdapterVersion) -> None:
        was_asked.append(asked.wait(2))
        load(adapter)

    def telling() -> None:
        asked.set()
        check()

    monkeypatch.setattr(engine.program, "load_adapter", slow)
    monkeypatch.setattr(engine, "_check_base", telling)
    engine.load_adapter(scripted_adapter(1))
    assert was_asked == [is_beside] and asked.is_set()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_adapter_that_was_away_is_checked_when_it_is_loaded_again(
    engine_config: EngineConfig, over_scripted_server: None, scripted_adapter: MakeAdapter, set_fault: SetFault, kind: str
) -> None:
    config = engine_config.but(kind=kind)
    engine = ready(config, scripted_adapter(1))
    engine.load_adapter(scripted_adapter(2))
    set_fault("forgets the adapter")
    with pytest.raises(WrongAnswer, match="canary"):
        engine.load_adapter(scripted_adapter(1))


def test_an_engine_that_is_unsound_from_its_first_launch_on_is_no_measure_for_the_next(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("garbage")
    with pytest.raises(WrongAnswer, match="canary"):
        ready(config, scripted_adapter(1))
    set_fault("")
    ready(config, scripted_adapter(1))


def test_nor_where_it_was_replaced_before_a_canary_could_show_it(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("garbage")
    ready(config, scripted_adapter(0)).stop()  # the base model has no canary: nothing can show it yet
    set_fault("")
    with pytest.raises(WrongAnswer, match="golden check"):
        ready(config, scripted_adapter(1))
    ready(config, scripted_adapter(1))  # which its canary has confirmed
    set_fault("garbage")
    with pytest.raises(WrongAnswer, match="golden check"):
        ready(config, scripted_adapter(2))


def test_what_the_trainer_has_confirmed_stays_the_measure(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = ready(config, scripted_adapter(1))
    set_fault("garbage")
    with pytest.raises(WrongAnswer, match="golden check"):
        engine.load_adapter(scripted_adapter(2))
    with pytest.raises(WrongAnswer, match="golden check"):
        ready(config, scripted_adapter(2))


@pytest.mark.parametrize(
    ("version", "fault", "message"),
    [(1, "forgets the adapter", "canary"), (1, "garbage", "canary"), (0, "garbage", "golden check")],
)
def test_an_engine_that_goes_wrong_while_it_samples_is_found_out_after_the_last_sample(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, version: int, fault: str, message: str
) -> None:
    engine = ready(config, scripted_adapter(version))
    set_fault(fault)
    with pytest.raises(WrongAnswer, match=message):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(version)))


def fails(samples: list[Sample]) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_engine_that_went_wrong_is_found_out_also_where_its_samples_could_not_be_kept(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    engine = ready(config, adapter)
    set_fault("forgets the adapter")
    with pytest.raises(WrongAnswer, match="canary") as caught, Journal(path, {}) as journal:
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal, on_complete=fails))
    assert isinstance(caught.value.__cause__, OSError)
    with Journal(path, {}) as journal:
        assert not journal.samples


def test_samples_whose_engine_was_not_asked_again_are_used_after_it_was(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    """Whoever asked for them was killed after the last one: all are in the journal, and the engine that gave them lives."""
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    engine = ready(config, adapter)
    with Journal(path, {}) as journal:
        samples, _ = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    with Journal(path, {}) as journal:
        again, how = ready(config, adapter).generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert (again, how.num_kept) == (samples, 12)
    set_fault("forgets the adapter")
    # The scripted engine checks at each load, the others when something has changed.
    with pytest.raises(WrongAnswer, match="canary"), Journal(path, {}) as journal:
        ready(config, adapter).generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    if config.kind != "scripted":
        assert path.with_name("samples.journal.aside-0").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("NaN", "log-probability nan"),
        ("positive log-probability", "log-probability 0.5"),
        ("token out of the vocabulary", "1000000 is outside"),
        ("no output", "no output tokens"),
        ("lost log-probability", "tokens with"),
        ("aborts", "finish reason 'abort'"),
        ("too few samples", "11 samples, 12 were asked for|not the form"),
    ],
)
def test_a_sample_that_cannot_be_is_an_error_with_its_evidence_and_nothing_of_the_rollout_is_used(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, fault: str, message: str
) -> None:
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    engine = ready(config, adapter)
    set_fault(fault)
    with pytest.raises(WrongAnswer, match=message) as caught, Journal(path, {}) as journal:
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert caught.value.evidence
    if fault != "too few samples":
        aside = path.with_name("samples.journal.aside-0").read_bytes()
        assert len(aside.splitlines()) == 1, "it was checked before it was kept"
    set_fault("")
    with Journal(path, {}) as journal:
        _, how = ready(config, adapter).generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert how.num_kept == 0


def test_an_engine_that_dies_among_its_samples_is_replaced_and_gives_only_those_that_are_missing(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    config = config.but(max_running_requests=1)  # so that most answers have come when it dies, and none is lost on its way
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    undisturbed, whole = ready(config, adapter).generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    set_fault("dies after 17" if config.kind != "scripted" else "dies")  # the server counts from its start
    with pytest.raises(EngineUnavailable), Journal(path, {}) as journal:
        open_engine(config, adapter).generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    set_fault("")
    with Journal(path, {}) as journal:
        told, earlier = list[Sample](), set(journal.samples)
        samples, how = ready(config, adapter).generate(
            RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal, on_sample=told.append)
        )
    assert samples == undisturbed
    keys = [(sample.prompt_id, sample.sample_index) for sample in told]
    assert len(set(keys)) == len(keys) == 12 and set(keys[: how.num_kept]) == earlier, "each is told of, the journal's first"
    assert 0 < how.num_kept < 12
    assert how.num_new_output_tokens == whole.num_new_output_tokens - sum(
        len(sample.output_tokens) for sample in list(journal.samples.values())[: how.num_kept]
    )


def test_memory_of_an_engine_that_is_gone_needs_no_release(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = ready(config, scripted_adapter(0))
    engine.stop()
    assert "no engine is running" in engine.release_memory().reason


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("fault", ["one connection reset", "connection reset"])
def test_a_lost_request_is_sent_again_to_a_healthy_engine_and_not_for_ever(
    engine_config: EngineConfig,
    over_scripted_server: None,
    scripted_adapter: MakeAdapter,
    set_fault: SetFault,
    kind: str,
    fault: str,
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind=kind), adapter)
    samples, _ = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    before = server_process.recorded()
    set_fault(fault)
    if fault == "connection reset":  # of each request
        with pytest.raises(EngineUnavailable, match=r"ServerDisconnected|reset"):
            engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    else:
        assert engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))[0] == samples
        assert server_process.recorded() == before, "the engine is the same"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_the_time_of_a_request_does_not_run_while_others_are_answered(
    engine_config: EngineConfig, over_scripted_server: None, scripted_adapter: MakeAdapter, set_fault: SetFault, kind: str
) -> None:
    """Each of twelve samples takes the server half a second, one after the other: the last one waits for six seconds, the limit is four."""
    adapter = scripted_adapter(1)
    engine = ready(engine_config.but(kind=kind, request_timeout_s=4), adapter)
    set_fault("one by one")
    samples, _ = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert len(samples) == 12
    set_fault("hangs")
    with pytest.raises(EngineUnavailable, match=r"no answer|Timeout"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
