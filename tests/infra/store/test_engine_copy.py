"""The stacked copy of an adapter is loaded where it is as it was written, and is otherwise left out."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from shared import written_adapter

from infra.engines.sglang.engine import SGLangEngine
from infra.engines.vllm.engine import VLLMEngine
from infra.megatron.protocol.job import ENGINE_CONFIG, ENGINE_WEIGHTS
from infra.records import AdapterVersion
from infra.store.files import DigestMismatch, path_of, record_of, verified_for_engine, write
from infra.store.layout import adapter_folder


@pytest.fixture
def adapter(workspace: Path) -> AdapterVersion:
    plain, folder = written_adapter("{}"), adapter_folder("r", 1)
    write(folder / ENGINE_CONFIG, b"{}")
    return plain.model_copy(update={"engine_weights": record_of(write(folder / ENGINE_WEIGHTS, b"stacked"))})


def test_only_sglang_reads_the_stacked_copy(adapter: AdapterVersion) -> None:
    folder = adapter_folder("r", 1)
    assert SGLangEngine.folder_of(adapter) == folder / "engine"
    assert SGLangEngine.folder_of(adapter.model_copy(update={"engine_weights": None})) == folder
    assert VLLMEngine.folder_of(adapter) == folder


@pytest.mark.parametrize("name", [ENGINE_WEIGHTS, ENGINE_CONFIG])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"other")])
def test_a_copy_that_is_not_as_it_was_written_is_never_loaded(
    adapter: AdapterVersion, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infra")
    folder = adapter_folder("r", 1)
    damage(folder / name)
    assert verified_for_engine(adapter) == folder
    assert "is not as it was written, the weights beside it are loaded instead" in caplog.text
    assert adapter.weights is not None
    path_of(adapter.weights).write_bytes(b"other")
    with pytest.raises(DigestMismatch, match="has changed since it was written"):
        verified_for_engine(adapter)
