"""How long the stand-in of training holds the GPUs."""

import json
from pathlib import Path

import pytest

from infra.comparison import preflight
from infra.comparison.config import ComparisonConfig
from infra.comparison.measurement import memory_holder
from infra.machine import devices

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComparisonConfig:
    """Of a mixture, on one GPU."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "num_gpus", lambda: 1)
    return ComparisonConfig(model=str(tmp_path), max_input_tokens=100, max_output_tokens=100)


def test_a_training_takes_the_time_of_the_weights_that_a_token_meets(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H200")
    attention, experts = 2 * (2 * 64 * 64 + 2 * 64 * 32), 2 * 2 * 3 * 64 * 96
    expected = 4 * (attention + experts) * config.num_rollouts * 200 / (0.4 * 989e12)
    assert memory_holder.seconds(config) == pytest.approx(expected)
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA A100-SXM4-80GB")
    assert memory_holder.seconds(config) == pytest.approx(expected * 989 / 312)


def test_a_gpu_whose_peak_is_not_known_needs_the_time(config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "processor", lambda: "Tesla T4")
    assert "the peak of Tesla T4 is not known" in str(preflight._train_time(config)) and "--train-s" in str(
        preflight._train_time(config)
    )
    assert preflight._train_time(config.model_copy(update={"train_s": 3.0})) is None
