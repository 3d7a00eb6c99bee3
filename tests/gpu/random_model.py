"""Make a Hugging Face folder of a well-known shape with random weights: `python tests/gpu/random_model.py SHAPE FOLDER`.

For runs whose mechanics and speed matter, on machines without the real weights. The tokenizer is the tiny model's.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

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
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}


def main(shape: str, folder: Path) -> None:
    tokenizer = train_tokenizer()
    config = Qwen2Config(**(COMMON | SHAPES[shape]), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
