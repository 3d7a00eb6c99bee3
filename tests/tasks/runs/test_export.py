"""What a run leaves behind for other libraries."""

import shutil
from pathlib import Path

import pytest
import shared

from infra.config import ExportConfig
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.store.files import read_json
from tasks.runs.finish_run import export


def test_an_exported_adapter_names_its_base_model_so_that_peft_can_load_it(workspace: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, workspace / "models/tiny")
    adapter = shared.written_adapter('{"r": 8, "base_model_name_or_path": "tiny"}')
    export(ExportConfig(), adapter, workspace / "export")
    assert read_json(workspace / "export/adapter" / ADAPTER_CONFIG) == {
        "r": 8,
        "base_model_name_or_path": str(workspace / "models/tiny"),
    }
    assert (workspace / "export/adapter" / ADAPTER_WEIGHTS).read_bytes() == b"weights"


def test_an_adapter_is_not_merged_into_a_base_model_that_has_changed(workspace: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, workspace / "models/tiny")
    with pytest.raises(ValueError, match=r"base model 'tiny' is not what run 'r' was begun with: .*, recorded was 0\. Put"):
        export(ExportConfig(what="merged"), shared.written_adapter("{}"), workspace / "export")
    assert not (workspace / "export/merged").exists()
