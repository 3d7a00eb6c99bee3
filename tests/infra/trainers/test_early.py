"""Where a persistent trainer is started beside the engine, before its first job is there."""

from typing import Literal

import pytest

from infra import trainers
from infra.config import TrainerConfig
from infra.records import AdapterVersion, BaseModelRef
from infra.trainers import resident

BASE = BaseModelRef(id="tiny", sha256="0" * 64)
ADAPTER = AdapterVersion(run="r", version=0, base=BASE, rank=4, alpha=8, target_modules=("q_proj",), seed=0)


@pytest.mark.parametrize(
    ("device", "mode", "is_on_cluster", "is_started"),
    [
        ("cuda", "persistent", False, True),
        ("cuda", "per_step", False, False),
        ("cuda", "persistent", True, False),
        ("cpu", "persistent", False, False),
    ],
)
def test_it_starts_early_on_a_gpu_of_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    mode: Literal["persistent", "per_step"],
    is_on_cluster: bool,
    is_started: bool,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(trainers.devices, "device", lambda: device)
    monkeypatch.setattr(trainers.connection, "is_set", lambda: is_on_cluster)
    monkeypatch.setattr(trainers, "job_without_batch", lambda config, adapter: (config.mode, adapter.version))
    monkeypatch.setattr(resident, "start_early", started.append)
    trainers.start_early(TrainerConfig(mode=mode), ADAPTER)
    assert started == ([("persistent", 0)] if is_started else [])
