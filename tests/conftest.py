"""What all tests share: a workspace of their own, and a model folder that costs nothing to make."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any Hugging Face library is imported: a test that would reach for the hub fails at once instead.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from infra.settings import settings

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 512,
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session", autouse=True)
def _datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty workspace; settings are read anew, so a test that changes others clears their cache itself."""
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    yield tmp_path
    settings.cache_clear()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with the tokenizer of the tiny models, and one tensor in the place of weights."""
    import numpy as np
    import safetensors.numpy

    from infra.tiny_model.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    train_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    safetensors.numpy.save_file({"lm_head.weight": np.zeros((640, 2), np.float32)}, folder / "model.safetensors")
    return folder
