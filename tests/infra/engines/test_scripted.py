"""The shipped fake as a program: what the border needs of it besides its answers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.config import EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines import scripted
from infra.engines.interface import SampleRequest
from infra.engines.scripted import ScriptedEngine
from infra.failures import EngineUnavailable
from infra.records import AdapterVersion
from infra.store.files import read_json


def test_while_it_loads_an_adapter_it_answers_by_the_one_before(
    workspace: Path,
    engine_config: EngineConfig,
    scripted_adapter: Callable[[int], AdapterVersion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = scripted_adapter(1), scripted_adapter(2)
    engine = ScriptedEngine(engine_config.but(kind="scripted"), first.base)
    engine.wake()
    engine.load_adapter(first)
    served = []

    def asked_meanwhile(path: Path) -> Any:  # Any: whatever json gives
        served.append(engine.served_adapters())
        return read_json(path)

    monkeypatch.setattr(scripted, "read_json", asked_meanwhile)
    engine.load_adapter(second)
    served.append(engine.served_adapters())
    assert served == [(first.served_name,), (second.served_name,)]
    engine.stop()


def test_of_replicas_that_sample_at_one_time_one_dies_of_the_fault_dies_once(
    workspace: Path, engine_config: EngineConfig, scripted_adapter: Callable[[int], AdapterVersion]
) -> None:
    adapter = scripted_adapter(1)
    replicas = [ScriptedEngine(engine_config.but(kind="scripted"), adapter.base, number) for number in range(8)]
    request = SampleRequest(Prompt(0, 0, "?", "#### 4", [4, 5, 6], seed=70), 0)

    def died(engine: ScriptedEngine) -> bool:
        try:
            engine.sample([request], SamplingConfig(), adapter, lambda sample: True)
        except EngineUnavailable:
            return True
        return False

    with ThreadPoolExecutor(len(replicas)) as threads:
        for _ in range(50):
            scripted.fault_path().write_text("dies once")
            assert sum(threads.map(died, replicas)) == 1
