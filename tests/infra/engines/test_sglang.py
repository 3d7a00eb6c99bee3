"""The SGLang border against a scripted server: adoption, fencing, golden check, canary, and what goes wrong."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from infra import failures
from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import RolloutRequest, SampleSink
from infra.engines.journal import Journal
from infra.engines.scoring import ScoreRequest
from infra.engines.server import server_engine, server_process
from infra.engines.sglang.engine import SGLangEngine, begin_by_cache
from infra.failures import EngineCrashedAgain, EngineOutOfMemory, EngineRefused, EngineUnavailable, WrongAnswer
from infra.processes import children
from infra.records import AdapterVersion
from infra.settings import SECRETS, settings

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(2)
]
SAMPLING = SamplingConfig(group_size=2, max_output_tokens=8)

pytestmark = pytest.mark.usefixtures("over_scripted_server")


def test_a_later_engine_adopts_the_living_server(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    open_engine(engine_config, scripted_adapter(0)).wake()
    first = server_process.recorded()
    open_engine(engine_config, scripted_adapter(0)).wake()
    assert first is not None and server_process.recorded() == first


def test_a_servers_collector_passes_over_what_is_there_after_its_launch(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    for _ in range(2):
        open_engine(engine_config, scripted_adapter(0)).wake()
    assert (workspace / "fault.collector").read_text() == "/freeze_gc\n"


def test_other_flags_need_another_server_and_the_old_one_is_ended(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    open_engine(engine_config, scripted_adapter(0)).wake()
    first = server_process.recorded()
    open_engine(engine_config.but(max_running_requests=3), scripted_adapter(0)).wake()
    second = server_process.recorded()
    assert first is not None and second is not None
    assert second.launch == first.launch + 1
    assert children.find(first.process) is None


def test_the_shared_memory_of_a_killed_server_is_removed(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    open_engine(engine_config, scripted_adapter(0)).wake()
    state = server_process.recorded()
    assert state is not None
    segment = Path(f"/dev/shm/sglang_loads_scripted_{state.process.pid}.shm")
    assert segment.exists()
    children.stop_program(state.process.program)
    assert segment.exists()
    server_process.stop_recorded()
    assert not segment.exists()


def test_a_dead_server_is_replaced(engine_config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    first = server_process.recorded()
    assert first is not None
    process = children.find(first.process)
    assert process is not None
    process.kill()
    process.wait(10)
    engine.wake()
    second = server_process.recorded()
    assert second is not None and second.launch == first.launch + 1


def test_a_server_that_was_interrupted_in_a_change_is_not_adopted(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = open_engine(engine_config, scripted_adapter(1))
    engine.wake()
    first = server_process.recorded()
    set_fault("HTTP 500")
    with pytest.raises(EngineUnavailable, match="HTTP 500"):
        engine.load_adapter(scripted_adapter(1))
    set_fault("")
    engine.wake()
    engine.load_adapter(scripted_adapter(1))
    second = server_process.recorded()
    assert first is not None and second is not None
    assert second.launch == first.launch + 1
    assert children.find(first.process) is None


def test_the_old_adapter_is_unloaded_when_the_new_one_is_served(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    for version in (1, 2):
        engine.load_adapter(scripted_adapter(version))
    state = server_process.recorded()
    assert state is not None
    assert list(httpx.get(f"{state.url}/adapters", headers=server_process.authorization(state.url)).json()) == [
        scripted_adapter(2).served_name
    ]


def test_each_launch_has_a_key_of_its_own_that_only_its_file_shows(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine, keys = open_engine(engine_config, scripted_adapter(0)), []
    for _ in range(2):
        engine.wake()
        state = server_process.recorded()
        assert state is not None
        keys.append(server_process.key_path().read_text())
        assert server_process.key_path().stat().st_mode & 0o777 == 0o600
        assert httpx.get(f"{state.url}/adapters").status_code == 401
        assert httpx.get(f"{state.url}/adapters", headers={"Authorization": "Bearer guess"}).status_code == 401
        process = children.find(state.process)
        assert process is not None
        assert keys[-1] not in " ".join([*process.cmdline(), *process.environ().values()])
        holding = [path for path in workspace.rglob("*") if path.is_file() and keys[-1].encode() in path.read_bytes()]
        assert holding == [server_process.key_path()]
        engine.stop()
    assert len(set(keys)) == 2
    assert not server_process.key_path().exists()


def test_the_engine_gets_no_secret_of_ours(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SECRETS, "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "user:hunter2")
    open_engine(engine_config, scripted_adapter(0)).wake()
    state = server_process.recorded()
    assert state is not None
    process = children.find(state.process)
    assert process is not None
    assert "hunter2" not in " ".join(process.environ().values())


@pytest.mark.parametrize(("host", "in_url"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_an_engine_listens_where_it_is_told_to(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, host: str, in_url: str
) -> None:
    monkeypatch.setenv("RATCHET_HOST", host)
    settings.cache_clear()
    open_engine(engine_config, scripted_adapter(0)).wake()
    state = server_process.recorded()
    assert state is not None
    assert state.url.startswith(f"http://{in_url}:")


def test_an_engine_whose_check_was_interrupted_is_checked_before_it_is_used(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    engine.load_adapter(scripted_adapter(0))
    state = server_process.recorded()
    assert state is not None and state.is_verified
    server_process.remember(state.but(is_verified=False))  # as if we had died between the wake and the check
    set_fault("garbage")
    engine.wake()
    with pytest.raises(WrongAnswer, match="golden check"):
        engine.load_adapter(scripted_adapter(0))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("None", "log-probability nan"),  # JSON has no NaN, some servers write null
        ("no JSON", "not the form"),
        ("no text", "not the form"),
        ("too few samples", "not the form"),
    ],
)
def test_an_answer_of_another_form_is_kept_as_evidence(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str, message: str
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    set_fault(fault)
    with pytest.raises(WrongAnswer, match=message) as caught:
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(0)))
    assert caught.value.evidence


def test_a_text_with_the_highest_token_of_the_vocabulary_is_told_like_any_other(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    program: SGLangEngine = engine.program  # type: ignore[attr-defined]
    highest = program.vocab_size - 1
    assert len(program.logprobs([4, highest, 5, 6], None)) == 3
    by_cache = ScoreRequest([*range(4, 12), highest], None, is_by_cache=True)
    assert program.score([by_cache])[0].text == by_cache.text


def test_a_proxy_of_this_machine_stands_in_nobodys_way(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    assert len(engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(0)))[0]) == len(PROMPTS) * SAMPLING.group_size


def test_a_server_does_not_close_connections_that_a_busy_client_leaves_idle(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    open_engine(engine_config, scripted_adapter(0)).wake()
    state = server_process.recorded()
    process = children.find(state.process) if state else None
    assert process is not None and float(process.environ()["SGLANG_TIMEOUT_KEEP_ALIVE"]) >= 600


def test_log_probs_are_those_at_the_sampling_temperature_whatever_the_shell_says(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer divides logits by the temperature. This switch of SGLang's gives log-probs at temperature 1, and canaries are asked at 1."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    open_engine(engine_config, scripted_adapter(0)).wake()
    state = server_process.recorded()
    process = children.find(state.process) if state else None
    assert process is not None and process.environ()["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"


def test_a_request_that_the_server_refuses_is_not_a_matter_of_its_health(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    set_fault("HTTP 400")
    with pytest.raises(EngineRefused, match="HTTP 400 oh no"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(0)))


@pytest.mark.parametrize("fault", ["HTTP 500", "HTTP 503", "connection reset", "dies", "hangs", "hangs altogether"])
def test_a_server_that_fails_is_ended_and_the_next_one_is_checked_and_serves_the_right_adapter(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, fault: str
) -> None:
    adapter, impatient = scripted_adapter(1), engine_config.but(request_timeout_s=1)
    engine = open_engine(impatient, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    first = server_process.recorded()
    set_fault(fault)
    with pytest.raises(EngineUnavailable):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert first is not None and children.find(first.process) is None, "a server that hangs would be adopted again"
    set_fault("")
    engine.wake()
    engine.load_adapter(adapter)
    second = server_process.recorded()
    assert second is not None and (second.launch, second.is_verified) == (first.launch + 1, True)
    assert second.adapters == (adapter.served_name,)
    assert len(engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))[0]) == 4


def test_a_server_that_hangs_in_its_check_is_ended_too(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "CONTROL_TIMEOUT_S", 1.0)
    engine = open_engine(engine_config, scripted_adapter(0))
    engine.wake()
    set_fault("hangs")
    with pytest.raises(EngineUnavailable, match="ReadTimeout"):
        engine.load_adapter(scripted_adapter(0))
    assert server_process.recorded() is None


def test_an_engine_that_finds_no_memory_says_so(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("out of memory")
    with pytest.raises(EngineOutOfMemory, match=r"torch\.OutOfMemoryError"):
        open_engine(engine_config, scripted_adapter(0)).wake()
    with pytest.raises(EngineCrashedAgain, match=r"ran out of memory twice, .* lower engine\.memory_fraction \(0\.8\)"):
        open_engine(engine_config, scripted_adapter(0)).wake()
    assert failures.verdict(EngineCrashedAgain("x"), num_attempts=1, trouble_s=0).is_retried is False


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("does not start")
    with pytest.raises(EngineUnavailable, match="no GPU today"):
        open_engine(engine_config, scripted_adapter(0)).wake()
    assert server_process.recorded() is None


def test_a_server_that_never_gets_ready_is_ended_at_the_deadline(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    set_fault("never gets ready")
    with pytest.raises(EngineUnavailable, match="not ready after 1 s"):
        open_engine(engine_config.but(start_timeout_s=1), scripted_adapter(0)).wake()
    assert server_process.recorded() is None


def test_a_changed_adapter_file_is_not_loaded(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine, adapter = open_engine(engine_config, scripted_adapter(0)), scripted_adapter(1)
    engine.wake()
    assert adapter.weights is not None
    (workspace / adapter.weights.path).write_bytes(b"tampered with")
    with pytest.raises(RuntimeError, match="has changed"):
        engine.load_adapter(adapter)


@pytest.mark.parametrize(("num_tokens", "begin"), [(2, 0), (3, 1), (5, 2), (40, 23), (257, 240)])
def test_the_end_of_a_text_is_left_to_be_computed_by_way_of_the_prefix_cache(num_tokens: int, begin: int) -> None:
    assert begin_by_cache(num_tokens) == begin


def test_a_deterministic_rollout_begins_with_an_empty_cache_and_each_prompt_has_its_own_part_of_it(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    order = workspace / "fault.order"
    engine, adapter = open_engine(engine_config, scripted_adapter(1)), scripted_adapter(1)
    engine.wake()
    engine.load_adapter(adapter)
    keys: list[set[str]] = []
    for _ in range(2):  # after the checks of the load, then after the checks and samples of another rollout
        order.write_text("")
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
        flush, *prompts = [line for line in order.read_text().splitlines() if line != "check"]
        assert order.read_text().splitlines()[0] == flush == "flush"
        leaders, samples = ([line.split()[1] for line in prompts if line.startswith(kind)] for kind in ("leader", "sample"))
        assert len(leaders) == len(set(leaders)) == 2, "each prompt has a key of its own"
        assert sorted(samples) == sorted(2 * leaders), "and each of its samples has that key"
        keys.append(set(leaders))
    assert not keys[0] & keys[1]


def test_what_a_resumed_rollout_lacks_begins_with_an_empty_cache_too(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine, adapter, order = open_engine(engine_config, scripted_adapter(1)), scripted_adapter(1), workspace / "fault.order"
    engine.wake()
    engine.load_adapter(adapter)
    with Journal(workspace / "journal", {}) as journal:
        for sample in engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))[0][:3]:
            journal.add(sample)
    order.write_text("")
    with Journal(workspace / "journal", {}) as journal:
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter), SampleSink(journal))
    assert [line.split()[0] for line in order.read_text().splitlines()][:3] == ["flush", "leader", "sample"]


def test_requests_that_a_client_has_left_behind_are_broken_off_before_the_cache_is_emptied(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    engine, adapter = open_engine(engine_config, scripted_adapter(1)), scripted_adapter(1)
    engine.wake()
    engine.load_adapter(adapter)
    set_fault("busy at first")
    engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    control = (workspace / "fault.control").read_text().splitlines()
    assert control == ["/abort_request all", "/flush_cache"], "the flushes before it were refused"


def test_without_deterministic_mode_the_cache_is_kept_and_shared(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    engine, adapter = open_engine(engine_config.but(deterministic=False), scripted_adapter(1)), scripted_adapter(1)
    engine.wake()
    engine.load_adapter(adapter)
    engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    order = (workspace / "fault.order").read_text().splitlines()
    assert "flush" not in order and "sample None" in order


def test_without_seeds_of_requests_each_step_run_and_launch_draws_from_a_seed_of_its_own(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter
) -> None:
    def seed(adapter: AdapterVersion, **changes: object) -> int:
        engine = open_engine(engine_config.but(**changes), adapter)
        engine.wake()
        state = server_process.recorded()
        process = children.find(state.process) if state else None
        assert process is not None
        words = process.cmdline()
        engine.stop()
        return int(words[words.index("--random-seed") + 1])

    first, second = scripted_adapter(0), scripted_adapter(1)
    drawn = [seed(adapter, deterministic=False) for adapter in (first, second, second)]
    assert len(set(drawn)) == 3 and all(0 <= each < 2**31 for each in drawn)
    assert seed(first.model_copy(update={"run": "other"}), deterministic=False) not in drawn
    assert seed(second) == 0, "in deterministic mode each request has its own"
    of = {open_engine(engine_config.but(deterministic=False), adapter).identity for adapter in (first, second)}
    assert len(of) == 1, "a living server is not ended for the next step's seed"


def test_what_an_engine_died_of_is_said_and_the_same_crash_is_not_tried_a_third_time(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine, adapter = open_engine(engine_config, scripted_adapter(1)), scripted_adapter(1)

    def crash(fault: str = "crashes") -> str:
        set_fault("")
        engine.wake()
        engine.load_adapter(adapter)
        set_fault(fault)
        with pytest.raises(EngineUnavailable) as caught:
            engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
        return failures.classify(caught.value).name + "\n" + str(caught.value)

    first, second = crash(), crash()
    assert first.startswith("engine unavailable") and second.startswith("engine crashed again")
    for scores in (first, second):
        assert "in complete" in scores and "AssertionError: LoRA buffer shape does not match, at " in scores
    assert crash().startswith("engine unavailable"), "the same command again has two tries again"
    assert crash("dies").startswith("engine unavailable"), "killed, without a traceback"
    set_fault("")
    engine.wake()
    engine.load_adapter(adapter)
    engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert crash().startswith("engine unavailable"), "an engine that has done it in between has shown that it can be done"


def test_a_prefix_cache_too_small_for_a_deterministic_rollout_is_warned_of(
    engine_config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, caplog: pytest.LogCaptureFixture
) -> None:
    engine, adapter = open_engine(engine_config.but(max_running_requests=1), scripted_adapter(1)), scripted_adapter(1)
    engine.wake()
    engine.load_adapter(adapter)
    engine.generate(RolloutRequest(PROMPTS, SAMPLING, adapter))
    assert "unequal parts" not in caplog.text
    set_fault("forgets prompts")
    engine.generate(RolloutRequest(PROMPTS, SAMPLING.but(group_size=8), adapter))
    assert "of 2 prompts found unequal parts of them in the prefix cache" in caplog.text
