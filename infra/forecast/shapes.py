"""GPUs by their data sheets, and shapes of known models."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from infra.colocation.trainer_memory import Model
from infra.models.architecture import base_shapes, parse_architecture, read_architecture

GIB = 2**30
MOST_GPUS = 8


class GpuKind(NamedTuple):
    memory_bytes: int
    """As NVML reports it, or what the data sheet says where no such GPU was at hand."""
    bandwidth: float
    """Of its memory, relative to an H200's; from the data sheets."""
    arithmetic: float
    """Dense bfloat16, relative to an H200's; from the data sheets."""


GPU_KINDS = {
    "H200": GpuKind(143771 * 2**20, 1.0, 1.0),
    "H100": GpuKind(81559 * 2**20, 3.35 / 4.8, 1.0),
    "A100": GpuKind(80 * GIB, 2.04 / 4.8, 312 / 989),
    "B200": GpuKind(180 * GIB, 8.0 / 4.8, 2250 / 989),
}

QWEN: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936}  # Any: JSON
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN
    | {"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2.5-1.5b": QWEN
    | {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2.5-3b": QWEN
    | {"model_type": "qwen2", "num_hidden_layers": 36, "hidden_size": 2048, "intermediate_size": 11008}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2.5-7b": QWEN
    | {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "qwen3-30b-a3b": QWEN
    | {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
}
"""Fields of config.json, by name."""


def gpus_in(text: str) -> tuple[int, str]:
    """Number and kind of GPUs in `8xH100`.

    Raises:
        ValueError: for another form, an unknown kind, or a number that is not 1 to 8.
    """
    count, _, kind = text.rpartition("x")
    if kind.upper() not in GPU_KINDS:
        raise ValueError(f"--gpus {text}: GPU kind {kind!r} is not known; known are {', '.join(GPU_KINDS)}, such as 8xH100")
    if not count.isdecimal() or not 1 <= int(count) <= MOST_GPUS:
        raise ValueError(
            f"--gpus {text}: the number of GPUs must be 1 to {MOST_GPUS}, those of one machine, such as 8x{kind.upper()}"
        )
    return int(count), kind.upper()


def model_of(name: str) -> Model:
    """The model of a known shape, or of a folder with config.json, its weights in bfloat16.

    Raises:
        ValueError: for neither of them, or a model that cannot be trained.
    """
    if name.lower() not in SHAPES and not Path(name).is_dir():
        raise ValueError(f"--model {name}: neither a folder nor a known shape; known are {', '.join(SHAPES)}")
    a = parse_architecture(SHAPES[name.lower()]) if name.lower() in SHAPES else read_architecture(Path(name))
    return Model(2 * sum(math.prod(shape) for shape in base_shapes(a).values()), a)


def with_layers(model: Model, num_layers: int | None) -> Model:
    """The same model with as many layers; None: as it is."""
    if num_layers is None:
        return model
    a = dataclasses.replace(model.architecture, num_layers=num_layers)
    return Model(2 * sum(math.prod(shape) for shape in base_shapes(a).values()), a)
