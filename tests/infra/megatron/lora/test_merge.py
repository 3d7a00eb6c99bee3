"""A merged model is the base with its adapter beside it, to Hugging Face too."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from infra.megatron.lora import merge
from infra.megatron.model import base_weights
from infra.megatron.protocol.job import ADAPTER_CONFIG
from infra.store.files import read_json

TOKENS = torch.arange(40)[None] * 7 % 512


def logits_of(net: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = net(TOKENS).logits
    return logits


def test_a_merged_model_gives_the_logits_of_base_and_adapter(
    model: Callable[[str], Path], hugging_face: Callable[[Path], PreTrainedModel], train: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("qwen3", "qwen3-moe"):
        base, made, out = tmp_path / name, train(name), tmp_path / f"{name}-merged"
        hugging_face(model(name)).save_pretrained(base, max_shard_size="100KB")
        (base / "tokenizer.json").write_text("{}")
        merge.merge(base, made.job.output_dir, out)
        assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()}
        assert len(list(out.glob("*.safetensors"))) > 2
        assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
        before = logits_of(hugging_face(base))
        expected = logits_of(PeftModel.from_pretrained(hugging_face(base), made.job.output_dir))
        found = logits_of(hugging_face(out))
        assert (found - expected).abs().max() < 2e-5
        assert (found - before).abs().max() > 0.1


def test_a_bfloat16_base_is_rounded_once(
    model: Callable[[str], Path], hugging_face: Callable[[Path], PreTrainedModel], train: Callable[..., Any], tmp_path: Path
) -> None:
    made, base, out = train(), tmp_path / "base", tmp_path / "out"
    hugging_face(model("qwen3")).bfloat16().save_pretrained(base)
    merge.merge(base, made.job.output_dir, out)
    name = "model.layers.1.self_attn.o_proj"
    with base_weights.Checkpoint(base) as before, base_weights.Checkpoint(out) as after:
        a, b = (made.adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        found, exact = after[f"{name}.weight"][:], before[f"{name}.weight"][:].double() + 2 * b.double() @ a.double()
        assert found.dtype is torch.bfloat16
        assert torch.all((found.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert logits_of(loaded).isfinite().all()


@pytest.fixture
def parts(model: Callable[[str], Path], train: Callable[..., Any]) -> tuple[Path, Any]:
    return model("qwen3"), train(lora={"rank": 4, "alpha": 8, "target_modules": ["q_proj"]})


def test_what_does_not_fit_is_refused(
    parts: tuple[Path, Any], model: Callable[[str], Path], edit_json: Callable[..., None], tmp_path: Path
) -> None:
    base, made = parts
    adapter, out = made.job.output_dir, tmp_path / "out"

    def refused(said: str, *, base: Path = base) -> None:
        with pytest.raises(ValueError, match=said):
            merge.merge(base, adapter, out)
        assert not out.exists()

    refused(r"q_proj.lora_B.weight has shape \(128, 4\), should be \(64, 4\)", base=model("qwen3-untied"))
    config = read_json(adapter / ADAPTER_CONFIG)
    for changes, said in (
        ({"use_rslora": True}, "use_rslora true cannot be merged"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern .* cannot be merged"),
        ({"r": 8}, "has shape"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "cannot be used"),
    ):
        edit_json(adapter / ADAPTER_CONFIG, **changes)
        refused(said)
        edit_json(adapter / ADAPTER_CONFIG, **config)
    (adapter / ADAPTER_CONFIG).rename(adapter / "elsewhere.json")
    refused("has no adapter_config.json")
    (adapter / "elsewhere.json").rename(adapter / ADAPTER_CONFIG)
    out.mkdir()
    with pytest.raises(ValueError, match="is already there"):
        merge.merge(base, adapter, out)


def test_the_program_says_what_is_wrong_in_one_line(
    parts: tuple[Path, Any], tmp_path: Path, child_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "infra.megatron.lora.merge", str(parts[0]), str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, env=child_environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: adapter {tmp_path} has no adapter_config.json")
