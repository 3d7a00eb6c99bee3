"""Replicas over scripted servers: what each has of its own, and a rollout that outlives one of them."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shared import becomes, is_gone

from infra import engines
from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest, SampleSink, TurnRequest
from infra.engines.journal import Journal
from infra.engines.replicas import assignment, routed_turns, shared_rollout
from infra.engines.replicas.routed_turns import RoutedTurns, replica_counts
from infra.engines.replicas.shared_rollout import SharedRollout
from infra.engines.server import server_process
from infra.failures import EngineUnavailable, WrongAnswer
from infra.processes import children
from infra.records import AdapterVersion
from infra.store.samples import Sample

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(4)
]
SAMPLING = SamplingConfig(group_size=4, max_output_tokens=8)


@pytest.fixture
def config(engine_config: EngineConfig, over_scripted_server: None) -> EngineConfig:
    return engine_config.but(kind="sglang", replicas=2, request_timeout_s=3)


def ready(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def pid_of(replica: int) -> int:
    state = server_process.recorded(replica)
    assert state is not None
    return state.process.pid


def answered(workspace: Path) -> list[str]:
    path = workspace / "fault.answered"
    return path.read_text().splitlines() if path.exists() else []


@contextmanager
def struck(workspace: Path, replica: int, sign: signal.Signals, after: int) -> Iterator[None]:
    """Send a signal to a replica when this many samples have been answered by all of them."""
    pid, num_before = pid_of(replica), len(answered(workspace))

    def strike() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if sum(line != "leader" for line in answered(workspace)[num_before:]) >= after:
                os.kill(pid, sign)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=strike)
    thread.start()
    yield
    thread.join()


def test_each_replica_has_a_state_a_key_a_port_and_a_log_of_its_own(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine = ready(config, scripted_adapter(1))
    states = engines.recorded()
    assert [state.replica for state in states] == [0, 1]
    for field in ("url", "log_path", "launch"):
        assert len({getattr(state, field) for state in states}) == 2, field
    assert all(state.is_verified and state.adapters == (scripted_adapter(1).served_name,) for state in states)
    keys = [(workspace / name).read_text() for name in ("engine.key", "engine-1.key")]
    assert keys[0] != keys[1]
    assert len(list((workspace / "golden").iterdir())) == 2, "each is compared with what it said itself"
    assert '"replica"' not in (workspace / "engine-1.json").read_text(), "the file's name says it"
    engine.stop()
    assert engines.recorded() == [] and not list(workspace.glob("engine*.key"))


def test_another_process_adopts_all_replicas_and_one_of_fewer_replicas_ends_the_rest(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    ready(config.but(replicas=3), adapter)
    before = engines.recorded()
    ready(config.but(replicas=3), adapter)
    assert engines.recorded() == before
    last = before[2].process
    ready(config, adapter)
    assert [state.process for state in engines.recorded()] == [state.process for state in before[:2]]
    assert children.find(last) is None
    ready(config.but(replicas=1), adapter)
    assert [state.process for state in engines.recorded()] == [before[0].process]


def sampled(engine: Engine, adapter: AdapterVersion, sink: SampleSink | None = None) -> list[Sample]:
    return engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), sink or SampleSink())[0]


@pytest.mark.parametrize("kind", ["scripted", "sglang", "vllm"])
def test_one_two_and_three_replicas_give_equal_samples(config: EngineConfig, scripted_adapter: MakeAdapter, kind: str) -> None:
    adapter = scripted_adapter(1)
    found = [sampled(ready(config.but(kind=kind, replicas=number), adapter), adapter) for number in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_samples_of_a_replica_that_is_lost_in_a_rollout_are_made_by_the_other_and_none_twice(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, sign: signal.Signals
) -> None:
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    undisturbed = sampled(ready(config.but(replicas=1), adapter), adapter)
    engine, other, struck_pid = ready(config, adapter), pid_of(0), pid_of(1)
    set_fault("one by one")
    (workspace / "fault.answered").unlink()
    with struck(workspace, 1, sign, after=4), Journal(path, {}) as journal:
        samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
        assert len(journal.samples) == 0 and path.read_bytes().count(b"\n") == 1 + 16, "each was written once"
    assert samples == undisturbed
    assert how.num_lost_replicas == 1 and 0 < how.num_moved_samples <= 8
    state = server_process.recorded(1)
    assert pid_of(0) == other and state is not None and state.process.pid != struck_pid, "the lost one was started again"
    assert state.is_verified and state.adapters == (adapter.served_name,), "with golden check, canary and adapter"
    set_fault("")
    samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert samples == undisturbed and how.num_lost_replicas == 0, "no wake was needed"


def test_a_lost_replica_that_cannot_be_started_again_is_left_to_the_next_wake(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)
    expected = sampled(engine, adapter)

    def does_not_start() -> None:
        raise EngineUnavailable("no port is free")

    wake = engine.replicas[1].wake  # type: ignore[attr-defined]
    engine.replicas[1].wake = does_not_start  # type: ignore[attr-defined]
    set_fault("one by one")
    (workspace / "fault.answered").unlink()
    with struck(workspace, 1, signal.SIGKILL, after=4):
        samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert samples == expected and how.num_lost_replicas == 1 and server_process.recorded(1) is None
    engine.replicas[1].wake = wake  # type: ignore[attr-defined]
    set_fault("")
    engine.wake()
    engine.load_adapter(adapter)
    assert server_process.recorded(1) is not None and sampled(engine, adapter) == expected


def test_requests_of_a_stopped_replica_are_made_by_an_idle_one_long_before_the_time_out(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "SLOW_MIN_S", 0.5)
    monkeypatch.setattr(assignment, "SLOW_MIN_SAMPLES", 4)
    monkeypatch.setattr(shared_rollout, "END_S", 1.0)
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    engine = ready(config.but(request_timeout_s=120), adapter)
    expected, before = sampled(engine, adapter), pid_of(1)
    set_fault("one by one")
    (workspace / "fault.answered").unlink()
    begin = time.monotonic()
    with struck(workspace, 1, signal.SIGSTOP, after=2), Journal(path, {}) as journal:
        samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
        assert path.read_bytes().count(b"\n") == 1 + 16, "each was written once"
    assert samples == expected and how.num_reissued_samples > 0
    assert time.monotonic() - begin < 60, "the time-out is 120 s"
    assert how.num_lost_replicas == 1 and pid_of(1) != before, "it does not give up its requests: it is started again"


def test_a_replica_that_died_before_a_rollout_is_passed_over_in_it(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)
    expected = sampled(engine, adapter)
    pid = pid_of(0)
    os.kill(pid, signal.SIGKILL)
    assert becomes(lambda: is_gone(pid))
    samples, how = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert samples == expected and (how.num_lost_replicas, how.num_moved_samples) == (1, 0)


def test_a_rollout_fails_when_no_replica_is_left_and_keeps_what_was_made(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    # On a busy machine the first one may serve again before the second one is struck.
    monkeypatch.setattr(SharedRollout, "_restart", lambda *_: None)
    engine = ready(config, adapter)
    set_fault("one by one")
    (workspace / "fault.answered").unlink(missing_ok=True)
    with (
        pytest.raises(EngineUnavailable),
        struck(workspace, 0, signal.SIGKILL, after=3),
        struck(workspace, 1, signal.SIGKILL, after=5),
        Journal(path, {}) as journal,
    ):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert engines.recorded() == []
    set_fault("")
    with Journal(path, {}) as journal:
        assert 3 <= len(journal.samples) <= 8
        samples, how = ready(config, adapter).generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert len(samples) == 16 and how.num_kept == len(journal.samples)


def test_a_wrong_answer_of_one_replica_ends_all_and_sets_the_journal_aside(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    adapter, path = scripted_adapter(1), workspace / "samples.journal"
    engine = ready(config, adapter)
    set_fault("NaN after 3")  # one of them comes to its fourth sample first
    with pytest.raises(WrongAnswer), Journal(path, {}) as journal:
        sampled(engine, adapter, SampleSink(journal))
    assert engines.recorded() == []
    with Journal(path, {}) as journal:
        assert not journal.samples


def test_a_wrong_answer_of_one_replica_ends_the_sound_ones_too(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = ready(config, scripted_adapter(1))

    def answers_wrongly(adapter: AdapterVersion) -> None:
        raise WrongAnswer(f"replica 1 does not repeat what it said of {adapter.served_name}")

    engine.replicas[1].check_again = answers_wrongly  # type: ignore[attr-defined]
    with pytest.raises(WrongAnswer, match="replica 1"):
        sampled(engine, scripted_adapter(1))
    assert engines.recorded() == []


def test_an_adapter_is_served_by_all_replicas_or_no_sample_is_made(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine = ready(config, scripted_adapter(1))
    program = engine.replicas[1].program  # type: ignore[attr-defined]
    load, program.load_adapter = program.load_adapter, lambda adapter: os.kill(pid_of(1), signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        engine.load_adapter(scripted_adapter(2))
    program.load_adapter = load
    before = answered(workspace)
    with pytest.raises(WrongAnswer, match="asked for"):
        sampled(engine, scripted_adapter(1))  # the first replica serves adapter 2
    assert answered(workspace) == before, "nothing was sampled"
    engine.wake()
    engine.load_adapter(scripted_adapter(2))
    assert {sample.adapter_version for sample in sampled(engine, scripted_adapter(2))} == {2}


def test_the_last_needed_group_ends_the_requests_of_all_replicas(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config.but(request_timeout_s=60), adapter)
    set_fault("endless from 8")  # prompts 2 and 3 never end
    begin = time.monotonic()
    request = RolloutRequest(PROMPTS, SAMPLING, adapter, num_oversampled_prompts=2)
    samples, _ = engine.generate(request)
    assert {sample.prompt_id for sample in samples} == {0, 1} and time.monotonic() - begin < 50


async def turns_of(engine: Engine, adapter: AdapterVersion, strike: Callable[[], None]) -> tuple[list[Sample], dict[str, int]]:
    async with engine.turns(adapter) as turns:
        requests = [TurnRequest(prompt, 0, [4, 5, prompt], 70 + prompt, 1.0, 8) for prompt in range(8)]
        first = await asyncio.gather(*(turns.sample(request) for request in requests))
        strike()
        later = await asyncio.gather(*(turns.sample(request._replace(seed=request.seed + 100)) for request in requests))
    return [*first, *later], replica_counts(turns)


def undisturbed_turns(config: EngineConfig, adapter: AdapterVersion) -> list[Sample]:
    return asyncio.run(turns_of(ready(config.but(replicas=1), adapter), adapter, lambda: None))[0]


def kill(*replicas: int) -> None:
    for replica in replicas:
        os.kill(pid_of(replica), signal.SIGKILL)


def test_turns_of_a_lost_replica_are_made_by_the_other_while_it_is_started_again(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    undisturbed = undisturbed_turns(config, adapter)
    engine = ready(config, adapter)
    none = {"num_lost_replicas": 0, "num_moved_samples": 0, "num_reissued_samples": 0}
    assert asyncio.run(turns_of(engine, adapter, lambda: None)) == (undisturbed, none)
    struck_pid = pid_of(1)
    found, counts = asyncio.run(turns_of(engine, adapter, lambda: kill(1)))
    assert found == undisturbed and counts["num_lost_replicas"] == 1 and 0 < counts["num_moved_samples"] <= 8
    state = server_process.recorded(1)
    assert state is not None and state.process.pid != struck_pid, "the lost one was started again"
    assert state.is_verified and state.adapters == (adapter.served_name,), "with golden check, canary and adapter"
    assert asyncio.run(turns_of(engine, adapter, lambda: None)) == (undisturbed, none), "no wake was needed"
    with pytest.raises(EngineUnavailable):
        asyncio.run(turns_of(engine, adapter, lambda: kill(0, 1)))


def test_a_turn_that_fails_after_its_rollout_has_failed_starts_no_replica_again(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)

    async def failed() -> RoutedTurns:
        with pytest.raises(ZeroDivisionError):
            async with engine.turns(adapter) as turns:
                raise ZeroDivisionError
        assert isinstance(turns, RoutedTurns)
        await turns._lose(1, EngineUnavailable("gone"))
        return turns

    assert asyncio.run(failed())._restarts == {}
    assert engines.recorded() and [state.replica for state in engines.recorded()] == [0]


def test_a_replica_that_is_started_again_gets_the_next_turns_of_its_prompts(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)

    async def played() -> int:
        async with engine.turns(adapter) as turns:
            requests = [TurnRequest(prompt, 0, [4, 5, prompt], 70 + prompt, 1.0, 8) for prompt in range(8)]
            await asyncio.gather(*(turns.sample(request) for request in requests))
            kill(1)
            await asyncio.gather(*(turns.sample(request) for request in requests))
            assert isinstance(turns, RoutedTurns)
            await turns._restarts[1]
            await asyncio.gather(*(turns.sample(request) for request in requests))
            assert turns.num_prompt_tokens == 3 * 8 * 3, "the turns of the first server count too"
            return turns._turns[1].num_prompt_tokens

    assert asyncio.run(played()) > 0


def test_a_replica_that_cannot_be_started_again_in_a_rollout_of_episodes_is_left_to_the_next_wake(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    undisturbed = undisturbed_turns(config, adapter)
    engine = ready(config, adapter)

    def does_not_start() -> None:
        raise EngineUnavailable("no port is free")

    engine.replicas[1].wake = does_not_start  # type: ignore[attr-defined]
    assert asyncio.run(turns_of(engine, adapter, lambda: kill(1)))[0] == undisturbed
    assert server_process.recorded(1) is None


def test_turns_of_a_stopped_replica_are_made_by_an_idle_one_and_counted_once(
    config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_turns, "SLOW_MIN_S", 0.5)
    monkeypatch.setattr(routed_turns, "SLOW_MIN_SAMPLES", 2)
    adapter = scripted_adapter(1)
    undisturbed = undisturbed_turns(config, adapter)
    engine = ready(config.but(request_timeout_s=120), adapter)
    struck_pid, begin = pid_of(1), time.monotonic()
    found, counts = asyncio.run(turns_of(engine, adapter, lambda: os.kill(struck_pid, signal.SIGSTOP)))
    assert found == undisturbed, "each turn once"
    assert time.monotonic() - begin < 60 and 0 < counts["num_reissued_samples"] <= 8
    assert counts["num_lost_replicas"] == 1 and pid_of(1) != struck_pid, "it was ended and started again"
