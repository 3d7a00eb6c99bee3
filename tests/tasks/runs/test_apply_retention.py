"""Retention as a task: which adapters it may remove, by what MLflow and the store have."""

from pathlib import Path

import pytest
from shared import commit

from infra.config import RunConfig
from infra.mirror.copying import copy_run
from infra.settings import settings
from infra.store.files import new_id, write_json
from infra.store.layout import RunFolder, adapter_folder, run_folder
from infra.tracking import mlflow_store
from tasks.runs.apply_retention import apply_retention

CONFIG = RunConfig(name="mine").but(retention={"keep_last": 1, "of_others": "nothing"})


def test_an_adapter_without_a_copy_in_the_store_stays(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("RATCHET_STORE_URL", str(tmp_path / "store"))
    settings.cache_clear()
    monkeypatch.setattr(mlflow_store, "delivered_adapters", lambda run: {1, 2, 3})
    new_id(run_folder("mine"))
    write_json(RunFolder.of("mine").config, CONFIG.model_dump(mode="json"))
    for step in range(3):
        commit(CONFIG, step, {"reward/mean": 0.5}, weights=b"weights %d" % step)
    weights = adapter_folder("mine", 1) / "adapter_model.safetensors"
    assert weights.exists()
    apply_retention.fn(CONFIG)
    assert weights.exists(), "there is no copy of it"
    assert copy_run("mine")
    apply_retention.fn(CONFIG)
    assert not weights.exists()
