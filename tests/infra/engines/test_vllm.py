"""The vLLM border against its twin: sleep and wake, what vLLM answers 200 to and has not done, its key, its numbers."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest, SampleSink
from infra.engines.request_timing import Load
from infra.engines.server import server_process
from infra.engines.server.installed import installed
from infra.engines.vllm import engine as vllm
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.processes import children
from infra.records import AdapterVersion
from infra.settings import settings

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(2)
]
SAMPLING = SamplingConfig(group_size=2, max_output_tokens=8)

pytestmark = pytest.mark.usefixtures("over_scripted_server")


@pytest.fixture
def config(engine_config: EngineConfig) -> EngineConfig:
    return engine_config.but(kind="vllm")


def ready(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def says_sleeping() -> bool:
    state = server_process.recorded()
    assert state is not None
    return bool(server_process.get(state.url, "/is_sleeping", 10).json()["is_sleeping"])


def test_it_sleeps_and_wakes_with_its_adapter(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)
    before = engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))[0]
    first = server_process.recorded()
    engine.release_memory()
    assert says_sleeping()
    engine.wake()
    second = server_process.recorded()
    assert not says_sleeping()
    assert first is not None and second is not None and second.process == first.process
    assert engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))[0] == before


@pytest.mark.parametrize(("fault", "message"), [("does not sleep", "told to sleep"), ("does not wake", "told to wake up")])
def test_what_vllm_answers_200_to_and_has_not_done_is_an_error(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str, message: str
) -> None:
    engine = ready(config, scripted_adapter(1))
    with pytest.raises(EngineUnavailable, match=message):
        if fault == "does not wake":
            engine.release_memory()
        set_fault(fault)
        engine.release_memory() if fault == "does not sleep" else engine.wake()
    assert server_process.recorded() is None, "it was ended"


def test_after_sleep_level_2_weights_are_read_again(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vllm.SLEEP_LEVEL, "keep_weights", 2)
    engine = ready(config, scripted_adapter(1))
    engine.release_memory()
    set_fault("reloads under LoRA")
    engine.wake()
    engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(1)))


def test_weights_that_cannot_be_read_again_end_the_server(
    config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vllm.SLEEP_LEVEL, "keep_weights", 2)
    engine = ready(config, scripted_adapter(1))
    engine.release_memory()
    with pytest.raises(EngineUnavailable, match="KeyError"):
        engine.wake()
    assert server_process.recorded() is None


def test_a_wake_from_level_2_without_its_weights_is_found_out(
    config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ready(config, scripted_adapter(1))
    monkeypatch.setitem(vllm.SLEEP_LEVEL, "keep_weights", 2)
    engine.release_memory()
    monkeypatch.setitem(vllm.SLEEP_LEVEL, "keep_weights", 1)  # nothing reloads the weights
    engine.wake()
    with pytest.raises(WrongAnswer, match="golden check"):
        engine.load_adapter(scripted_adapter(1))


def test_a_plan_that_this_vllm_cannot_carry_out_is_refused_with_what_can_be_done() -> None:
    vllm.check_plan("reload", "0.28.0")
    vllm.check_plan("offload", "0.26.0")
    with pytest.raises(ValueError, match=r"'reload' with vLLM 0\.26\.0.*use 'offload' or 'restart'"):
        vllm.check_plan("reload", "0.26.0")


def test_the_version_that_counts_is_the_one_that_would_be_imported(
    config: EngineConfig, scripted_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, elsewhere = tmp_path / "env/bin/python", tmp_path / "elsewhere"
    packages = tmp_path / "env/lib/python3.12/site-packages"
    (packages / "vllm-0.28.0.dist-info").mkdir(parents=True)
    assert installed(python, "", "vllm") == ("0.28.0", packages)
    (elsewhere / "vllm").mkdir(parents=True)
    assert installed(python, f"{tmp_path}:{elsewhere}", "vllm") is None, "it hides the other and has no metadata"
    (elsewhere / "vllm-0.26.0.dist-info").mkdir()
    assert installed(python, f"{tmp_path}:{elsewhere}", "vllm") == ("0.26.0", elsewhere)
    assert installed(python, str(elsewhere), "sglang") is None
    monkeypatch.setenv("RATCHET_VLLM_PYTHON", str(python))
    monkeypatch.setenv("RATCHET_VLLM_PYTHONPATH", str(elsewhere))
    settings.cache_clear()
    with pytest.raises(ValueError, match=r"'reload' with vLLM 0\.26\.0"):
        open_engine(config.but(colocation="reload"), scripted_adapter(0))


def test_the_room_of_its_kv_cache_is_what_it_says_and_not_blocks_by_their_size(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    open_engine(config, scripted_adapter(0)).wake()
    assert server_process.kv_cache_tokens() == 4096  # of 258 blocks of 16


def test_the_adapter_rank_is_one_that_vllm_takes() -> None:
    assert [vllm.lora_rank_that_fits(rank) for rank in (1, 4, 8, 9, 100)] == [1, 8, 8, 16, 128]
    with pytest.raises(ValueError, match="513"):
        vllm.lora_rank_that_fits(513)


def test_an_adapter_that_vllm_has_lost_is_refused_and_not_served_by_the_base(
    config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    adapter = scripted_adapter(1)
    engine = ready(config, adapter)
    state = server_process.recorded()
    assert state is not None
    server_process.post(state.url, "/v1/unload_lora_adapter", {"lora_name": adapter.served_name}, 10)
    with pytest.raises(EngineRefused, match="does not exist"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))


def test_its_key_guards_every_path_and_only_its_file_shows_it(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    open_engine(config, scripted_adapter(0)).wake()
    state, key = server_process.recorded(), server_process.key_path().read_text()
    assert state is not None
    for path in ("/sleep?level=1", "/collective_rpc", "/v1/completions"):
        assert httpx.post(state.url + path, json={}).status_code == 401
    process = children.find(state.process)
    assert process is not None
    assert key not in " ".join([*process.cmdline(), *process.environ().values()])
    assert [p for p in workspace.rglob("*") if p.is_file() and key.encode() in p.read_bytes()] == [server_process.key_path()]


def test_log_probabilities_are_asked_for_after_temperature(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    flags = open_engine(config, scripted_adapter(0)).flags
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert flags[flags.index("--generation-config") + 1] == "vllm"
    assert "VLLM_BATCH_INVARIANT=1" in flags
    assert "VLLM_BATCH_INVARIANT=1" not in open_engine(config.but(deterministic=False), scripted_adapter(0)).flags


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_timed_rollout_is_streamed_and_gives_the_same_samples(
    config: EngineConfig, scripted_adapter: MakeAdapter, kind: str
) -> None:
    adapter = scripted_adapter(1)
    engine, sampling = ready(config.but(kind=kind), adapter), SAMPLING.but(ignore_eos=True)
    samples = engine.generate(RolloutRequest(PROMPTS, sampling, adapter))[0]
    load = Load(concurrency=2)
    assert engine.generate(RolloutRequest(PROMPTS, sampling, adapter), SampleSink(load=load))[0] == samples
    assert [len(sample.output_tokens) for sample in samples] == [8] * 4
    assert [request.num_tokens for request in load.requests] == [8] * 4
    assert all(0 < request.ttft_s <= request.latency_s for request in load.requests)


def test_a_prompt_with_one_sample_is_not_sent_ahead_where_its_first_token_is_timed(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    base = scripted_adapter(0)
    engine = ready(config, base)
    engine.generate(RolloutRequest(PROMPTS, SAMPLING.but(group_size=1), base), SampleSink(load=Load(concurrency=2)))
    assert "leader" not in (workspace / "fault.answered").read_text()
    engine.generate(RolloutRequest(PROMPTS, SAMPLING.but(group_size=1), base))
    assert "leader" in (workspace / "fault.answered").read_text()


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("aborts the stream", EngineUnavailable, "the stream broke off"),
        ("ends the stream early", EngineUnavailable, "the stream ended early, after 1 chunks"),
        ("NaN", WrongAnswer, "log-probability nan"),
        ("HTTP 500", EngineUnavailable, "HTTP 500"),
        ("HTTP 400", EngineRefused, "HTTP 400"),
    ],
)
def test_what_goes_wrong_in_a_stream_is_classed_as_elsewhere(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str, error: type[Exception], message: str
) -> None:
    base = scripted_adapter(0)
    engine = ready(config, base)
    set_fault(fault)
    with pytest.raises(error, match=message):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, base), SampleSink(load=Load(concurrency=2)))
