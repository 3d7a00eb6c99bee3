"""`ratchet up --warm`: the engine is started once, its kernels stay, and no engine is left."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import write_interpreter

from flows.cli.services.servers import config_to_warm, warm_engine
from flows.presets import preset
from infra.config import RunConfig
from infra.engines.checked import CheckedEngine
from infra.engines.server import server_process
from infra.failures import WrongAnswer
from infra.processes import kernel_caches
from infra.records import AdapterVersion
from infra.settings import CHECKOUT, settings
from infra.store.files import write_json
from infra.store.layout import Workspace

SCRIPT = CHECKOUT / "tests/infra/engines/scripted_sglang_server.py"


@pytest.fixture
def config(random_tiny: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """Its engine is the scripted server."""
    program = write_interpreter(workspace / "python-of-sglang", f"{sys.executable} {SCRIPT}", {"scripted": "1"})
    monkeypatch.setenv("RATCHET_SGLANG_PYTHON", str(program))
    monkeypatch.setenv("RATCHET_TEST_FAULT", str(workspace / "fault"))
    settings.cache_clear()
    yield preset("smoke").but(model=str(random_tiny))
    server_process.stop_recorded()


def test_kernels_stay_and_the_engine_does_not(config: RunConfig) -> None:
    assert "compiled 1 files, ended" in warm_engine(config)
    assert kernel_caches.files_in(Workspace.here().kernels) and server_process.all_recorded() == []
    assert "compiled 0 files, ended" in warm_engine(config)


def test_an_engine_that_fails_after_its_start_is_ended(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(engine: CheckedEngine, adapter: AdapterVersion) -> None:
        raise WrongAnswer("golden check")

    monkeypatch.setattr(CheckedEngine, "load_adapter", refuse)
    with pytest.raises(WrongAnswer):
        warm_engine(config)
    assert server_process.all_recorded() == []


def test_a_preset_or_a_file_is_chosen(tmp_path: Path) -> None:
    assert config_to_warm("arithmetic-gpu") == preset("arithmetic-gpu")
    path = write_json(tmp_path / "mine.json", {"model": "small"})
    assert config_to_warm(str(path)).model == "small"
    with pytest.raises(ValueError, match="preset 'gsm9k' is unknown"):
        config_to_warm("gsm9k")
