"""Engines to test, each with a base model and adapters that it can serve."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import load_module, write_interpreter

from infra.config import EngineConfig
from infra.engines.server import server_process
from infra.megatron.protocol.job import CANARY, Canary
from infra.models import base_model
from infra.records import AdapterVersion, BaseModelRef
from infra.settings import settings
from infra.store.files import record_of, write, write_json

SERVERS = {kind: Path(__file__).with_name(f"scripted_{kind}_server.py") for kind in ("sglang", "vllm")}
scripted_server = load_module(Path(__file__).with_name("scripted_server.py"))

CANARY_TOKENS = [5, 6, 7, 8, 9, 10]
MakeAdapter = Callable[[int], AdapterVersion]


@pytest.fixture
def set_fault(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the scripted server misbehave from now on."""
    path = workspace / "fault"
    monkeypatch.setenv("RATCHET_TEST_FAULT", str(path))
    return lambda fault: path.write_text(fault) and None


@pytest.fixture
def base(random_tiny: Path, workspace: Path) -> BaseModelRef:
    return base_model.reference(str(random_tiny))


@pytest.fixture
def over_scripted_server(workspace: Path, set_fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the interpreters of SGLang and vLLM be some that start the scripted servers instead."""
    for kind, script in SERVERS.items():
        program = write_interpreter(workspace / f"python-of-{kind}", f"{sys.executable} {script}", {"scripted": "1"})
        monkeypatch.setenv(f"RATCHET_{kind.upper()}_PYTHON", str(program))
    settings.cache_clear()
    yield
    server_process.stop_recorded()


@pytest.fixture
def scripted_adapter(base: BaseModelRef, workspace: Path) -> MakeAdapter:
    """Adapters whose canary says what the scripted server says of them."""

    def make(version: int) -> AdapterVersion:
        empty = AdapterVersion(run="r", version=version, base=base, rank=4, alpha=8, target_modules=("q_proj",), seed=0)
        if version == 0:
            return empty
        folder = settings().workspace / "runs" / "r" / "adapters" / f"{version:06d}"
        says = [
            [scripted_server.logprob(CANARY_TOKENS[:n], path) for n in range(1, len(CANARY_TOKENS))]
            for path in (None, str(folder))
        ]
        weights = write(folder / "adapter_model.safetensors", b"weights of %d" % version)
        canary = Canary(tokens=CANARY_TOKENS, base_logprobs=says[0], adapter_logprobs=says[1])
        told = write_json(folder / CANARY, canary.model_dump())
        return empty.model_copy(update={"weights": record_of(weights), "canary": record_of(told)})

    return make


@pytest.fixture
def scripted_logprob() -> Callable[[list[int], str | None], float]:
    """What the scripted servers say of the token after these, by an adapter's folder."""
    return scripted_server.logprob


@pytest.fixture
def engine_config() -> EngineConfig:
    return EngineConfig(max_context_tokens=128, start_timeout_s=60, request_timeout_s=60)
