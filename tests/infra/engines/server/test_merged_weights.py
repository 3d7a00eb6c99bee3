"""lora_mode=merged: the adapter in the engine's weights; which weights gave an answer is said by the answer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import open_engine
from infra.engines.interface import Engine, RolloutRequest
from infra.engines.server import merged_weights, server_process
from infra.failures import WrongAnswer
from infra.records import AdapterVersion
from infra.store.files import verified

MakeAdapter = Callable[[int], AdapterVersion]
SetFault = Callable[[str], None]
PROMPTS = [
    Prompt(prompt_id=n, row_number=n, question="?", answer="#### 4", prompt_tokens=[4, 5, 6 + n], seed=70 + n) for n in range(2)
]
SAMPLING = SamplingConfig(group_size=2, max_output_tokens=8)

pytestmark = pytest.mark.usefixtures("over_scripted_server")


@pytest.fixture
def config(engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """The scripted server takes an adapter's own folder for merged weights."""

    def folder_of(adapter: AdapterVersion, model_folder: Path) -> Path:
        assert adapter.weights is not None
        return verified(adapter.weights).parent

    monkeypatch.setattr(merged_weights, "folder_of", folder_of)
    return engine_config.but(lora_mode="merged")


def ready(config: EngineConfig, adapter: AdapterVersion) -> Engine:
    engine = open_engine(config, adapter)
    engine.wake()
    engine.load_adapter(adapter)
    return engine


def control(workspace: Path) -> list[str]:
    """The control requests that the engine got, without the flush of its cache before each rollout."""
    path = workspace / "fault.control"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line != "/flush_cache"]


def test_each_version_is_merged_once_and_its_samples_are_its_own(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    for version in (0, 1, 2):
        engine = ready(config, scripted_adapter(version))
        engine.load_adapter(scripted_adapter(version))
        samples, _ = engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(version)))
        assert {sample.adapter_version for sample in samples} == {version}
        state = server_process.recorded()
        assert state is not None and state.launch == 1
    assert control(workspace) == ["/update_weights_from_disk"] * 2
    assert "--enable-lora" not in engine.flags


def test_back_to_the_base_model_all_its_weights_are_read_again(
    config: EngineConfig, scripted_adapter: MakeAdapter, workspace: Path
) -> None:
    ready(config, scripted_adapter(1))
    samples, _ = ready(config, scripted_adapter(0)).generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(0)))
    assert {sample.adapter_sha256 for sample in samples} == {"base"}
    assert control(workspace) == ["/update_weights_from_disk"] * 2


def test_an_answer_of_other_weights_is_refused(config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault) -> None:
    engine = ready(config, scripted_adapter(1))
    set_fault("another weight version after 1")
    with pytest.raises(WrongAnswer, match="answered with weights 'another', asked for 'r-v000001-"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(1)))


def test_weights_that_were_merged_and_never_vouched_for_are_no_measure(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path
) -> None:
    adapter = scripted_adapter(1)
    engine, state = ready(config, adapter), server_process.recorded()
    assert state is not None
    measure = workspace / f"golden/{engine.identity}-{adapter.served_name}.json"
    measure.unlink()
    server_process.remember(state.but(is_verified=False))  # as if we had died between merging and canary
    set_fault("garbage")
    engine.wake()
    with pytest.raises(WrongAnswer, match="canary"):
        engine.load_adapter(adapter)
    assert not measure.exists()
    set_fault("")
    ready(config, adapter)
    assert measure.exists()


def test_a_version_that_is_not_in_the_weights_is_not_sampled(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    engine = ready(config, scripted_adapter(1))
    with pytest.raises(WrongAnswer, match="asked for"):
        engine.generate(RolloutRequest(PROMPTS, SAMPLING, scripted_adapter(2)))


def test_an_update_that_changes_nothing_is_caught_though_it_says_the_new_version(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault
) -> None:
    engine = ready(config, scripted_adapter(1))
    set_fault("reads nothing")
    with pytest.raises(WrongAnswer, match="canary"):
        engine.load_adapter(scripted_adapter(2))
    assert server_process.recorded() is None


def test_an_update_without_effect_is_caught_even_where_rounding_would_hide_it(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.engines.health_checks.TOLERANCE_NATS", {"float32": 100.0})
    engine = ready(config, scripted_adapter(0))
    set_fault("reads nothing")
    with pytest.raises(WrongAnswer, match="changes nothing in the engine"):
        engine.load_adapter(scripted_adapter(1))


@pytest.mark.parametrize("plan", ["offload", "reload"])
def test_merged_weights_are_checked_after_a_wake(
    config: EngineConfig, scripted_adapter: MakeAdapter, set_fault: SetFault, workspace: Path, plan: str
) -> None:
    engine = ready(config.but(colocation=plan), scripted_adapter(1))
    engine.release_memory()
    if plan == "reload":
        engine.wake()  # the base model's weights, and its golden check
        engine.load_adapter(scripted_adapter(1))
        assert control(workspace)[-3:] == ["/update_weights_from_disk", "/continue_generation", "/update_weights_from_disk"]
    else:  # rehearsed without a GPU: the server is not told to keep a copy
        with pytest.raises(WrongAnswer, match="golden check"):
            engine.wake()


def test_an_adapter_on_other_matrices_needs_another_engine(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    ready(config, scripted_adapter(1))
    other = scripted_adapter(2).model_copy(update={"target_modules": ("k_proj",)})
    ready(config, other)
    state = server_process.recorded()
    assert state is not None and state.launch == 2
