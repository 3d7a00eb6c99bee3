"""How much GPU memory the engine's weights, adapters and KV cache take, and how many sequences it holds."""

from infra.colocation.trainer_memory import Model, num_lora_parameters, weight_bytes
from infra.config import ALL_LINEAR, EngineConfig
from infra.machine import devices
from infra.models.architecture import Architecture, linear_shapes

NUM_LORA_SLOTS = 2
"""Adapter slots of the engine on the GPU; no plan releases them."""


def engine_weight_bytes(engine: EngineConfig, model: Model) -> float:
    """The whole model's as the engine holds it: with engine.quantization 'fp8' its linear layers take a byte a weight."""
    linear = sum(out * into for out, into in linear_shapes(model.architecture).values())
    of_all, each = weight_bytes(engine.dtype, model), 4 if devices.dtype_of(engine.dtype) == "float32" else 2
    return of_all if engine.quantization == "none" else of_all - (each - 1) * linear


def kv_cache_bytes(engine: EngineConfig, a: Architecture, num_tokens: int) -> int:
    """Bytes of the keys and values of num_tokens tokens, on each GPU."""
    a_value = 4 if devices.dtype_of(engine.dtype) == "float32" else 2
    a_value = 1 if engine.kv_cache_dtype == "fp8" else a_value
    heads = max(1, a.num_kv_heads // engine.tensor_parallel)
    return 2 * a.num_layers * heads * a.head_dim * a_value * num_tokens


def lora_pool_bytes(engine: EngineConfig, model: Model) -> int:
    """Slots for adapters of the largest rank on all linear layers, on each GPU, as if nothing of them were split."""
    return NUM_LORA_SLOTS * 2 * num_lora_parameters(engine.max_lora_rank, ALL_LINEAR, model.architecture)


def cached_sequences(engine: EngineConfig, model: Model, gpu_bytes: int, num_tokens: int) -> int:
    """Sequences of as many tokens for which a replica's KV cache has room."""
    room = engine.memory_fraction * gpu_bytes - lora_pool_bytes(engine, model)
    room -= engine_weight_bytes(engine, model) / engine.tensor_parallel
    return int(room / kv_cache_bytes(engine, model.architecture, num_tokens))
