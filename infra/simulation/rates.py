"""What the plan knows of GPUs and models: sizes from data sheets, rates that were measured here, and estimates where none was."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from infra.colocation.trainer_memory import Model
from infra.models.architecture import base_shapes, num_active, parse_architecture, read_architecture

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
    "qwen2.5-7b": QWEN
    | {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "qwen3-30b-a3b": QWEN
    | {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
}
"""Fields of config.json, by name."""


class Rates(NamedTuple):
    engine_tokens_per_s: float
    """Of a full replica on one GPU."""
    request_tokens_per_s: float
    """Of a request that has a replica to itself."""
    trainer_rows_per_s: float
    """Tokens that one GPU trains per second, each prompt counted once per group."""
    source: str


MEASURED = {
    ("qwen2.5-7b", "H200"): Rates(18280, 82, 294912 / 16.5, "measured: docs/results/speed.md, 7B, step of 31.4 s"),
    ("qwen2.5-7b", "H100"): Rates(
        *(18280 * 3.35 / 4.8, 82, 294912 / 16.96),
        "trainer measured: docs/results/speed.md, 7B, 16.96 s; engine estimated from an H200 by memory bandwidth, not measured",
    ),
    ("qwen2.5-0.5b", "H100"): Rates(37600, 117.5, 105600 / 1.8, "measured: docs/results/speed.md, 0.5B preset, step of 4.95 s"),
}
"""By shape and kind of GPU. 294,912 rows: 64 prompts of 512 tokens, each with 8 samples of 512; 105,600: 64 of 150, each with 5 of 300.

A request alone: 12.1 ms a token at 7B, with 64 at a time (docs/results/h200-compare-engines.md), taken as equal on other GPUs, since it hardly
depends on the model's size. At 0.5B what each of 320 at a time had, so it is at least that."""


def gpus_in(text: str) -> tuple[int, str]:
    """Number and kind of GPUs in `8xH100`.

    Raises:
        ValueError: for another form, an unknown kind, or a number that is not 1 to 8.
    """
    count, _, kind = text.rpartition("x")
    if kind.upper() not in GPU_KINDS:
        raise ValueError(f"--gpus {text}: GPU kind {kind!r} is not known; known are {', '.join(GPU_KINDS)}, such as 8xH100")
    if not count.isdecimal() or not 1 <= int(count) <= MOST_GPUS:
        raise ValueError(f"--gpus {text}: the number of GPUs must be 1 to {MOST_GPUS}, those of one machine")
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


def rates_of(model: Model, kind: str) -> Rates:
    """Rates of a measured model of the same sizes; else estimates from 7B, and below it from 0.5B too."""
    same = {gpu: rates for (shape, gpu), rates in MEASURED.items() if model_of(shape).architecture == model.architecture}
    if kind in same:
        return same[kind]
    if same:
        known, known_kind = next((rates, gpu) for gpu, rates in same.items())
        return _on_other_gpu(known, known_kind, kind, f"estimated from {known_kind}s by data sheets, not measured")
    large, small = MEASURED["qwen2.5-7b", "H100"], MEASURED["qwen2.5-0.5b", "H100"]
    weights = [active_weights(model_of(shape)) for shape in ("qwen2.5-7b", "qwen2.5-0.5b")]
    ratio = active_weights(model) / weights[0]

    def at(rate: float, rate_of_small: float) -> float:
        """Above 7B in proportion to the active weights, below along the power of them that joins 7B and 0.5B."""
        power = -1 if ratio > 1 else math.log(rate_of_small / rate) / math.log(weights[1] / weights[0])
        return rate * ratio**power

    scaled = Rates(
        at(large.engine_tokens_per_s, small.engine_tokens_per_s),
        at(large.request_tokens_per_s, small.request_tokens_per_s),
        at(large.trainer_rows_per_s, small.trainer_rows_per_s),
        "",
    )
    return _on_other_gpu(scaled, "H100", kind, "estimated from 7B and 0.5B by active weights and data sheets, not measured")


def _on_other_gpu(rates: Rates, known: str, kind: str, source: str) -> Rates:
    """Engine by the GPUs' memory bandwidth, trainer by their arithmetic."""
    bandwidth = GPU_KINDS[kind].bandwidth / GPU_KINDS[known].bandwidth
    arithmetic = GPU_KINDS[kind].arithmetic / GPU_KINDS[known].arithmetic
    return Rates(rates.engine_tokens_per_s * bandwidth, rates.request_tokens_per_s, rates.trainer_rows_per_s * arithmetic, source)


def active_weights(model: Model) -> float:
    a = model.architecture
    return num_active(a, {name: math.prod(shape) for name, shape in base_shapes(a).items()})
