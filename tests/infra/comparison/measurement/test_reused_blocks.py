"""Blocks that are taken up from an output folder: only those that may stand beside what is made here."""

from pathlib import Path

import pytest

from infra.comparison.config import Block, ComparisonConfig
from infra.comparison.measurement import reused_blocks
from infra.comparison.measurement.measures import EngineStart
from infra.comparison.paths import block_folder, output_folder
from infra.comparison.results import START, read_start
from infra.machine import devices
from infra.store.files import write_json

BLOCK = Block(0, "vllm")
KEPT = "blocks/d/00-vllm"

pytestmark = pytest.mark.usefixtures("workspace")


@pytest.fixture
def config(tmp_path: Path) -> ComparisonConfig:
    return ComparisonConfig(output=str(tmp_path / "out"))


def made(folder: Path, **origin: str) -> EngineStart:
    """A block in this folder, from here but for what is said."""
    start = EngineStart(
        backend="vllm",
        round=0,
        start_s=1,
        version="1",
        flags=(),
        colocation="offload",
        reason="",
        log_path="/log",
        memory_before_gib=0,
        kv_pool_tokens=1,
        origin=reused_blocks.origin().model_copy(update=origin),
    )
    write_json(folder / START, start.model_dump(mode="json"))
    return start


def test_a_block_of_another_machine_of_this_kind_is_taken_up_and_one_that_is_here_stays(config: ComparisonConfig) -> None:
    start = made(output_folder(config) / KEPT, unit="GPU-9")
    reused_blocks.take_up(config, "d")
    assert read_start(block_folder("d", BLOCK)) == start
    newer = made(block_folder("d", BLOCK))
    reused_blocks.take_up(config, "d")
    assert read_start(block_folder("d", BLOCK)) == newer


def test_a_block_that_was_being_kept_is_not_there(config: ComparisonConfig) -> None:
    made(output_folder(config) / f"{KEPT}.partial")
    reused_blocks.take_up(config, "d")
    assert not block_folder("d", BLOCK).exists()


def test_a_block_of_another_kind_of_gpu_is_refused_and_both_are_named(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 1)
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H200")
    made(output_folder(config) / KEPT, machine="1 x NVIDIA H100")
    with pytest.raises(ValueError, match=r"out/blocks/d/00-vllm was made with machine 1 x NVIDIA H100 \(here: 1 x NVIDIA H200\)"):
        reused_blocks.take_up(config, "d")
    assert not block_folder("d", BLOCK).exists()


@pytest.mark.parametrize("field", ["code", "locks"])
def test_a_block_of_other_code_or_locks_is_refused_in_the_workspace_too(config: ComparisonConfig, field: str) -> None:
    made(block_folder("d", BLOCK), **{field: "other"})
    with pytest.raises(ValueError, match=rf"comparisons/d/blocks/00-vllm was made with {field} other \(here: "):
        reused_blocks.take_up(config, "d")


def test_a_block_that_does_not_say_where_it_was_made_is_refused(config: ComparisonConfig) -> None:
    folder = output_folder(config) / KEPT
    write_json(folder / START, made(folder).model_copy(update={"origin": None}).model_dump(mode="json"))
    with pytest.raises(ValueError, match="does not say where it was made"):
        reused_blocks.take_up(config, "d")
