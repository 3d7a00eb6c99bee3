"""The SGLang border against a scripted server: adoption, fencing, golden check, canary, and what goes wrong."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from infra import processes
from infra.config import EngineConfig, SamplingConfig
from infra.engines import open_engine, server
from infra.engines.base import EngineUnavailable, WrongAnswer
from infra.prompts import Prompt
from infra.records import AdapterVersion

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [Prompt(prompt_id=n, row=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(2)]
SAMPLING = SamplingConfig(group_size=2, max_output_tokens=8)

pytestmark = pytest.mark.usefixtures("over_scripted_server")


def test_a_later_engine_adopts_the_living_server(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    open_engine(engine_config, scripted_adapter(0)).wake()
    first = server.recorded()
    open_engine(engine_config, scripted_adapter(0)).wake()
    assert first is not None and server.recorded() == first


def test_other_flags_need_another_server_and_the_old_one_is_ended(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    open_engine(engine_config, scripted_adapter(0)).wake()
    first = server.recorded()
    open_engine(engine_config.but(max_running_requests=3), scripted_adapter(0)).wake()
    second = server.recorded()
    assert first is not None and second is not None
    assert second.launch == first.launch + 1
    assert processes.find(first.process) is None


def test_a_dead_server_is_replaced(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    first = server.recorded()
    assert first is not None
    process = processes.find(first.process)
    assert process is not None
    process.kill()
    process.wait(10)
    engine.wake()
    second = server.recorded()
    assert second is not None and second.launch == first.launch + 1


def test_the_old_adapter_is_unloaded_when_the_new_one_is_served(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    for version in (1, 2):
        engine.load_adapter(scripted_adapter(version))
    state = server.recorded()
    assert state is not None
    assert list(httpx.get(f"{state.url}/adapters").json()) == [scripted_adapter(2).served_name]


def test_an_engine_that_forgets_its_adapter_is_caught_by_the_canary(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    set_fault("forgets the adapter")
    with pytest.raises(WrongAnswer, match="canary"):
        engine.load_adapter(scripted_adapter(1))


def test_an_engine_that_answers_garbage_after_a_restart_is_caught_by_the_golden_check(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    engine.stop()
    set_fault("garbage")
    for _ in range(2):  # trying again does not get past it
        with pytest.raises(WrongAnswer, match="golden check"):
            engine.wake()
    set_fault("")
    engine.wake()


def test_an_engine_whose_check_was_interrupted_is_checked_before_it_is_used(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    state = server.recorded()
    assert state is not None and state.is_checked
    server.remember(state.but(is_checked=False))  # as if we had died between the wake and the check
    set_fault("garbage")
    with pytest.raises(WrongAnswer, match="golden check"):
        engine.wake()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("NaN", "log-probability nan"),
        ("positive log-probability", "log-probability 0.5"),
        ("token out of the vocabulary", "1000000 is outside"),
        ("no output", "no output tokens"),
        ("lost log-probability", "5 tokens with 4"),
        ("aborts", "finish reason 'abort'"),
    ],
)
def test_a_sample_that_cannot_be_is_an_error(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str, message: str
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    set_fault(fault)
    with pytest.raises(WrongAnswer, match=message):
        engine.generate(PROMPTS, SAMPLING, scripted_adapter(0))


@pytest.mark.parametrize("fault", ["HTTP 500", "dies"])
def test_an_engine_that_fails_is_unavailable_and_may_be_tried_again(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    set_fault(fault)
    with pytest.raises(EngineUnavailable):
        engine.generate(PROMPTS, SAMPLING, scripted_adapter(0))
    set_fault("")
    engine.wake()
    engine.generate(PROMPTS, SAMPLING, scripted_adapter(0))


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("does not start")
    with pytest.raises(EngineUnavailable, match="no GPU today"):
        open_engine(engine_config, scripted_adapter(0)).wake()
    assert server.recorded() is None


def test_a_server_that_never_gets_ready_is_ended_at_the_deadline(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("never gets ready")
    with pytest.raises(EngineUnavailable, match="not ready after 1 s"):
        open_engine(engine_config.but(start_timeout_s=1), scripted_adapter(0)).wake()
    assert server.recorded() is None


def test_a_changed_adapter_file_is_not_loaded(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine, adapter = open_engine(engine_config, scripted_adapter(0)), scripted_adapter(1)
    engine.wake()
    assert adapter.weights is not None
    (workspace / adapter.weights.path).write_bytes(b"tampered with")
    with pytest.raises(RuntimeError, match="has changed"):
        engine.load_adapter(adapter)
