"""The shipped fake as a program: what the border needs of it besides its answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.config import EngineConfig
from infra.engines import scripted
from infra.engines.scripted import ScriptedEngine
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
