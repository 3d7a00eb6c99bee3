"""How much GPU memory the engine's weights, adapters and KV cache take, how many sequences it holds, and what it keeps asleep."""

import math

from infra.colocation.machine import GIB, Machine
from infra.colocation.trainer_memory import Model, num_lora_parameters, weight_bytes
from infra.config import ALL_LINEAR, ColocationPlan, EngineConfig
from infra.machine import devices
from infra.models.architecture import Architecture, linear_shapes

NUM_LORA_SLOTS = 2
"""Adapter slots of the engine on the GPU; no plan releases them."""
ENGINE_RESIDUE_BYTES = int(2.5 * GIB)
"""Memory of an SGLang process that released everything: context, CUDA graphs, buffers. 1.3 to 2.5 GiB on an H200 (docs/results)."""
PARALLEL_RESIDUE_BYTES = int(1.5 * GIB)
"""Additional memory of each rank of a tensor-parallel engine: 1.0 GiB with two ranks on H200s. Probably buffers of NCCL and the all-reduce."""
KV_INDEX_BYTES = 48
"""Additional memory for each token that fits into the KV cache; it matters for tiny models. Measured on H200s: 45 bytes (5.2 GB with
117 million tokens, 0.55 GB with 12 million), allocated between the pool and the first CUDA graph."""


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


def at_work_bytes(engine: EngineConfig, machine: Machine) -> float:
    """Memory on each of an engine's GPUs while it samples, with what a sleeping judge keeps."""
    residue = ENGINE_RESIDUE_BYTES + (PARALLEL_RESIDUE_BYTES if engine.tensor_parallel > 1 else 0)
    return machine.replicas_per_gpu * (engine.memory_fraction * machine.gpu_bytes + residue) + machine.judge_bytes


def residue_bytes(colocation: ColocationPlan, engine: EngineConfig, model: Model, kv_cache_tokens: int = 0) -> int:
    """Memory that an engine may still hold on each of its GPUs after the plan's release. Raises ValueError for separate_gpus: it releases nothing."""
    residue = ENGINE_RESIDUE_BYTES + lora_pool_bytes(engine, model) + KV_INDEX_BYTES * kv_cache_tokens
    residue += PARALLEL_RESIDUE_BYTES if engine.tensor_parallel > 1 else 0
    match colocation:
        case "keep_weights":
            return residue + math.ceil(weight_bytes(engine.dtype, model) / engine.tensor_parallel)
        case "offload" | "reload":
            return residue
        case "restart":
            return 0
        case "separate_gpus":
            raise ValueError("colocation separate_gpus releases no memory: it has no residue to check")


def freed_bytes(colocation: ColocationPlan, engine: EngineConfig, model: Model, kv_cache_tokens: int) -> int:
    """The least memory that a plan frees on each of the engine's GPUs."""
    cache = kv_cache_bytes(engine, model.architecture, kv_cache_tokens)
    weights = weight_bytes(engine.dtype, model) // engine.tensor_parallel
    weights //= 1 if engine.quantization == "none" else 2  # of 8-bit floats; what stays at 16 bits comes on top
    return cache if colocation == "keep_weights" else cache + weights
