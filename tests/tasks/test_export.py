"""What a run leaves behind for other libraries."""

import shutil
from pathlib import Path

from infra.config import ExportConfig
from infra.files import adapter_folder, read_json, record_of, write
from infra.megatron.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.records import AdapterVersion, BaseModelRef
from tasks.finish_run import export


def test_an_exported_adapter_names_its_base_model_so_that_peft_can_load_it(workspace: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, workspace / "models/tiny")
    folder = adapter_folder("r", 1)
    adapter = AdapterVersion(
        run="r",
        version=1,
        base=BaseModelRef(id="tiny", sha256="0"),
        rank=8,
        alpha=16,
        target_modules=("q_proj",),
        seed=0,
        weights=record_of(write(folder / ADAPTER_WEIGHTS, b"weights")),
        adapter_config=record_of(write(folder / ADAPTER_CONFIG, b'{"r": 8, "base_model_name_or_path": "tiny"}')),
    )
    export(ExportConfig(), adapter, workspace / "export")
    assert read_json(workspace / "export/adapter" / ADAPTER_CONFIG) == {
        "r": 8,
        "base_model_name_or_path": str(workspace / "models/tiny"),
    }
    assert (workspace / "export/adapter" / ADAPTER_WEIGHTS).read_bytes() == b"weights"
