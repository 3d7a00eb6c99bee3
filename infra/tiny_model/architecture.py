"""The tiny models and a small one, with random weights."""

from typing import Literal

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Kind = Literal["tiny", "tiny-moe", "small"]

# Four layers learn the sums in fewer steps than three wider ones of the same cost, and tied embeddings in fewer than untied
# ones; 1.07 million parameters in all.
DENSE = {"num_hidden_layers": 4, "tie_word_embeddings": True}
# Untied, so that the two models together exercise both kinds of output layer. Random weights this large give a sharp
# distribution: a wrong expert or head shows in the log-probabilities.
MOE = {
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    # Two key-value heads, so that tensor parallel 2 can be tried.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


# 83 million parameters, nearly all of them in the layers: the vocabulary is the tiny models'.
SMALL = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def random_model(kind: Kind, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    common = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    match kind:
        case "tiny":
            return Qwen3ForCausalLM(Qwen3Config(**common, **SHAPE, **DENSE)).float()
        case "tiny-moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **SHAPE, **MOE)).float()
        case "small":
            return Qwen3ForCausalLM(Qwen3Config(**common, **SMALL)).float()
        case _:
            raise ValueError(f"no tiny model is called {kind!r}; choose from tiny, tiny-moe, small")
