"""What the scripts of tests/gpu compute without a GPU: sums over a trace, files of block sizes."""

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from shared import DENSE_7B, load_module

from infra.config import DataConfig, RunConfig
from infra.data.prompts import tokenized
from infra.models.architecture import parse_architecture
from infra.settings import CHECKOUT
from infra.store.files import open_workspace, read_json, read_json_lines, write_json
from infra.tiny_model.tokenizer import train_tokenizer

SHAPE = parse_architecture(DENSE_7B)


def script(name: str) -> ModuleType:
    return load_module(CHECKOUT / "tests/gpu" / f"{name}.py")


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


def test_block_sizes_are_written_for_every_layer_under_the_names_that_sglang_looks_for(tmp_path: Path) -> None:
    folder = script("lora_blocks").write_blocks(tmp_path / "blocks", SHAPE, rank=16, block_n=256, gpu="NVIDIA H200")
    files = {path.name: read_json(path) for path in folder.glob("csgmv_configs/triton_*/*.json")}
    assert set(files) == {
        "lora_expand,K=4608,R=16,S=3,device=NVIDIA_H200.json",
        "lora_expand,K=3584,R=16,S=1,device=NVIDIA_H200.json",
        "lora_expand,K=37888,R=16,S=2,device=NVIDIA_H200.json",
    }
    assert all(blocks["16"] == {"BLOCK_N": 256, "BLOCK_K": 16} for blocks in files.values())


def test_programs_of_a_decoding_step_are_counted_as_sglang_starts_them() -> None:
    blocks = script("lora_blocks")
    a_layer = 512 * (56 * 3 + 56 + 296 * 2 + 56)  # 64 columns each: query, output, gate and up, down
    assert blocks.num_programs(SHAPE, num_segments=512, block_n=64) == 28 * a_layer == 12_500_992
    assert blocks.num_programs(SHAPE, num_segments=512, block_n=256) < 28 * a_layer / 3.9


def test_a_trace_without_kernels_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="the trace has no GPU kernel"):
        script("kernel_times").by_kind([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}], num_steps=2)


def test_full_prompts_have_the_tokens_that_are_asked_for(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tests/gpu")
    open_workspace()
    train_tokenizer().save_pretrained(tmp_path)
    data = DataConfig(num_prompts=1, max_prompt_tokens=90)
    rows = list(read_json_lines(script("bench").full_prompts(data, tmp_path)))
    assert len({row["question"] for row in rows}) == 16
    assert {len(tokenized(data, tmp_path, row["question"])) for row in rows} <= {88, 89, 90}


def test_other_blocks_are_in_the_environment_of_the_servers_that_are_started_meanwhile(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tests/gpu")
    write_json(tmp_path / "config.json", DENSE_7B)
    speed = script("rollout_speed")
    bench = SimpleNamespace(options=SimpleNamespace(model=str(tmp_path)), config=RunConfig(model=str(tmp_path)))
    with speed.blocks_of(bench, 256):
        assert len(list(Path(os.environ[speed.VARIABLE]).glob("csgmv_configs/*/lora_expand,*.json"))) == 3
    assert speed.VARIABLE not in os.environ
    options = SimpleNamespace(small=False, backends=["triton"], blocks=[256])
    assert speed.kinds(options) == [
        ("triton", ["--lora-backend", "triton"], None), ("csgmv, blocks of 256", ["--lora-backend", "csgmv"], 256),
    ]  # fmt: skip


def test_idle_seconds_have_the_pauses_in_them_that_are_shorter_than_a_window_of_the_driver(tmp_path: Path) -> None:
    seen = [(9.0, 0), (10.0, 0), (10.5, 90), (11.0, 10), (11.5, 100), (12.25, 0), (12.5, 60), (12.75, 90)]
    (tmp_path / "seen.csv").write_text("".join(f"{at},{use},80.5,300,20.25\n" for at, use in seen))
    assert script("watch").idle_s(tmp_path / "seen.csv", [10.0, 12.0, 13.5]) == pytest.approx([1.0, 0.75])


def test_the_parts_of_a_hand_over_are_all_of_it() -> None:
    lasted = {
        "roll_out": (100.0, 20.0),
        "score": (120.5, 0.25),
        "assemble": (121.0, 0.5),
        "release": (120.5, 2.5),
        "reload": (160.0, 2.0),
    }
    verbs = {verb: {"began_at": at, "seconds": seconds} for verb, (at, seconds) in lasted.items()}
    verbs["roll_out"]["last_token_at"] = 119.0
    result = {"began_at": {"adapter": 123.5, "train": 124.0}, "seconds": {"adapter": 0.4, "train": 30.0, "export": 5.0}}
    assert script("bench").hand_over_parts(verbs, result) == {
        "engine asked again, texts": 1.0, "samples written": 0.5, "release, score and batch beside it": 2.5, "to the trainer": 0.5,
        "adapter read, to the first kernel": 0.5, "export, to the engine": 6.0, "reload": 2.0,
    }  # fmt: skip
