"""What the scripts of tests/gpu compute without a GPU: sums over a trace, files of block sizes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from infra.files import read_json, write_json
from infra.megatron.architecture import Architecture, read_architecture
from infra.settings import CHECKOUT

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "tests/gpu" / f"{name}.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def shape(tmp_path: Path) -> Architecture:
    write_json(tmp_path / "config.json", QWEN_7B)
    return read_architecture(tmp_path)


def kernel(name: str, begin_us: float, end_us: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": begin_us, "dur": end_us - begin_us}


def test_a_steps_time_is_that_of_its_kernels_by_kind_and_the_gaps_between_them() -> None:
    events = [
        kernel("_chunked_lora_shrink_kernel", 0, 1000),
        kernel("nvjet_tst_128x256", 500, 3000),  # two at a time
        kernel("flash_fwd_combine", 5000, 6000),
        kernel("rms_norm", 6000, 8000),
        {"cat": "cpu_op", "name": "aten::mm", "ts": -9000, "dur": 30000},
    ]
    found = script("kernel_times").by_kind(events, num_steps=2)
    assert found == {
        "LoRA": 0.5, "matrix products": 1.25, "attention": 0.5, "the rest": 1.0, "no kernel": 1.0, "step": 4.0,
    }  # fmt: skip


def test_block_sizes_are_written_for_every_layer_under_the_names_that_sglang_looks_for(
    shape: Architecture, tmp_path: Path
) -> None:
    folder = script("lora_blocks").write_blocks(tmp_path / "blocks", shape, rank=16, block_n=256, gpu="NVIDIA H200")
    files = {path.name: read_json(path) for path in folder.glob("csgmv_configs/triton_*/*.json")}
    assert set(files) == {
        "lora_expand,K=4608,R=16,S=3,device=NVIDIA_H200.json",
        "lora_expand,K=3584,R=16,S=1,device=NVIDIA_H200.json",
        "lora_expand,K=37888,R=16,S=2,device=NVIDIA_H200.json",
    }
    assert all(blocks["16"] == {"BLOCK_N": 256, "BLOCK_K": 16} for blocks in files.values())


def test_programs_of_a_decoding_step_are_counted_as_sglang_starts_them(shape: Architecture) -> None:
    blocks = script("lora_blocks")
    a_layer = 512 * (56 * 3 + 56 + 296 * 2 + 56)  # 64 columns each: query, output, gate and up, down
    assert blocks.num_programs(shape, num_segments=512, block_n=64) == 28 * a_layer == 12_500_992
    assert blocks.num_programs(shape, num_segments=512, block_n=256) < 28 * a_layer / 3.9
