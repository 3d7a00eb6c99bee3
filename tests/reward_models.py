"""Tiny reward models with random weights, for tests."""

from pathlib import Path
from typing import Any


def made(kind: str, folder: Path, **fields: object) -> Path:
    """A random model with a head for one number, and the tiny models' tokenizer. kind: llama or qwen2."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

    from infra.tiny_model.tokenizer import train_tokenizer

    tokenizer = train_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_labels": 1,
        "pad_token_id": tokenizer.pad_token_id,
        **fields,
    }
    torch.manual_seed(0)
    model: Any = (
        LlamaForSequenceClassification(LlamaConfig(**sizes))
        if kind == "llama"
        else Qwen2ForSequenceClassification(Qwen2Config(**sizes))
    )
    with torch.no_grad():
        model.score.weight.mul_(3)  # the scores of different texts differ, and are about 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
