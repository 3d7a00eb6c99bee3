"""Make a Hugging Face folder of a well-known shape with random weights: `python tests/gpu/random_model.py SHAPE FOLDER`.

For runs whose mechanics and speed matter, on machines without the real weights. The tokenizer is the tiny model's. Weights are made
and written shard by shard: a folder may be as large as the disk, whatever the memory.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from infra.models.architecture import base_shapes, read_architecture
from infra.store.files import write_json
from infra.tiny_model.tokenizer import train_tokenizer

COMMON: dict[str, Any] = {"max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # As the one before, with a quarter of its layers: for a first try.
    "qwen3-30b-a3b-12-layers": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # For checks of the scripts themselves and of numbers: small, yet with every part of the large ones.
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "vocab_size": 2048,
        "initializer_range": 0.05,
    },
    "small-moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "vocab_size": 2048,
        "initializer_range": 0.05,
    },
}
SHARD_BYTES = 4 * 10**9
NUM_WRITERS = 4


def main(shape: str, folder: Path) -> None:
    make(shape, folder, "cuda" if torch.cuda.is_available() else "cpu")


def make(shape: str, folder: Path, device: str) -> None:
    tokenizer = train_tokenizer()
    fields = COMMON | SHAPES[shape] | {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    is_mixture = "num_experts" in fields
    config: PreTrainedConfig = Qwen3MoeConfig(**fields) if is_mixture else Qwen2Config(**fields)
    config.architectures = ["Qwen3MoeForCausalLM" if is_mixture else "Qwen2ForCausalLM"]
    config.dtype = torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shards = split(base_shapes(read_architecture(folder)))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]

    def write(i: int) -> None:
        save_file(
            random_tensors(shards[i], i, fields.get("initializer_range", 0.02), device), folder / names[i], {"format": "pt"}
        )

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, range(len(shards))))
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(2 * prod(size) for shard in shards for size in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    print(f"{folder}: {total / 1e9:.2f} GB in {len(shards)} files", flush=True)


def split(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    num_bytes = 0
    for name, size in shapes.items():
        if num_bytes >= SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = size
        num_bytes += 2 * prod(size)
    return shards


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, std: float, device: str) -> dict[str, torch.Tensor]:
    """As a model begins: norms one, biases zero, matrices normal."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, size in shapes.items():
        value = torch.zeros(size, dtype=torch.bfloat16, device=device)
        if name.endswith("norm.weight"):
            value.fill_(1)
        elif not name.endswith(".bias"):
            value.normal_(0, std, generator=generator)
        tensors[name] = value.cpu()
    return tensors


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
