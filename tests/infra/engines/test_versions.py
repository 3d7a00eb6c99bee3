"""A server is of one set of versions: another set is another server, with golden references of its own."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.engines.server import server_process
from infra.records import AdapterVersion
from infra.settings import settings
from infra.store import code_digest

MakeAdapter = Callable[[int], AdapterVersion]
SAID = {
    "sglang": {
        "version": "0.5.18 (scripted twin, not SGLang)",
        "attention_backend": "torch_native",
        "lora_backend": "torch_native",
    },
    "vllm": {
        "version": "0.26.0 (scripted twin, not vLLM)",
        "attention_backend": "FLASH_ATTN",
        "lora_backend": "PunicaWrapperGPU",
    },
}


@pytest.fixture(params=["sglang", "vllm"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig, over_scripted_server: None) -> Iterator[EngineConfig]:
    yield engine_config.but(kind=request.param)
    server_process.stop_recorded()


def install(kind: str, version: str) -> None:
    python: Path = {"sglang": settings().sglang_python, "vllm": settings().vllm_python}[kind]
    told = python.with_name(f"{python.name}.versions.json")
    told.unlink()  # another file has another time
    told.write_text(json.dumps({"versions": {kind: version}, "has_bytecode": True, "path": [str(told)]}))


def test_a_server_of_another_version_is_ended_and_not_adopted(config: EngineConfig, scripted_adapter: MakeAdapter) -> None:
    install(config.kind, "1.0")
    adapter = scripted_adapter(0)
    before = open_engine(config, adapter)
    before.wake()
    before.load_adapter(adapter)
    launched = server_process.recorded()
    again = open_engine(config, adapter)
    again.wake()
    assert launched and (state := server_process.recorded()) and state.process == launched.process, "the same one is adopted"
    ran = again.ran()
    assert (ran.versions, ran.backends, ran.identity) == ({config.kind: "1.0"}, SAID[config.kind], before.identity)
    install(config.kind, "1.1")
    other = open_engine(config, adapter)
    assert other.identity != before.identity
    other.wake()
    assert (state := server_process.recorded()) and state.process != launched.process
    assert other.ran().versions == {config.kind: "1.1"}


def test_a_server_is_not_adopted_under_other_switches_of_its_libraries(
    config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = scripted_adapter(0)
    before = open_engine(config, adapter)
    before.wake()
    before.load_adapter(adapter)
    launched = server_process.recorded()
    assert "NVIDIA_TF32_OVERRIDE" not in before.ran().versions
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    other = open_engine(config, adapter)
    other.wake()
    assert launched and (state := server_process.recorded()) and state.process != launched.process
    assert other.ran().versions["NVIDIA_TF32_OVERRIDE"] == "1"


def test_a_server_that_another_launcher_started_is_not_adopted(
    config: EngineConfig, scripted_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = scripted_adapter(0)
    before = open_engine(config, adapter)
    before.wake()
    launched = server_process.recorded()
    digest = code_digest.digest
    monkeypatch.setattr(
        code_digest, "digest", lambda *names: "changed" if names == ("infra.engines.launchers",) else digest(*names)
    )
    other = open_engine(config, adapter)
    assert other.identity != before.identity
    other.wake()
    assert launched and (state := server_process.recorded()) and state.process != launched.process
