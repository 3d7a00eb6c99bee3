"""How engine and trainer share the GPUs: which plan, why, and what each plan must free. docs/colocation.md has the table.

The choice depends on the machine and the configuration only, never on what happens to be free: every process of a run comes to the
same plan, so that the engine's flags, and with them the living engine, stay the same.
"""

import math
from typing import Literal, NamedTuple

import psutil

from infra.colocation import judge_section, microbatch
from infra.colocation.trainer_memory import Model, held_bytes, model_in, num_lora_parameters, trainer_peak_bytes, weight_bytes
from infra.config import ALL_LINEAR, ATTENTION, ColocationPlan, EngineConfig, LoraConfig, RunConfig, TrainerConfig
from infra.machine import devices, nvml
from infra.machine.devices import Plan
from infra.models import base_model
from infra.models.architecture import Architecture
from infra.settings import settings

GIB = 2**30
ENGINE_RESIDUE_BYTES = int(2.5 * GIB)
"""Memory of an SGLang process that released everything: context, CUDA graphs, buffers. 1.3 to 2.5 GiB on an H200 (docs/results)."""
PARALLEL_RESIDUE_BYTES = int(1.5 * GIB)
"""Additional memory of each rank of a tensor-parallel engine: 1.0 GiB with two ranks on H200s. Probably buffers of NCCL and the all-reduce."""
KV_INDEX_BYTES = 48
"""Additional memory for each token that fits into the KV cache; it matters for tiny models. Measured on H200s: 45 bytes (5.2 GB with
117 million tokens, 0.55 GB with 12 million), allocated between the pool and the first CUDA graph."""
TRAINER_RESIDUE_BYTES = 3 * GIB
"""Memory of a sleeping persistent trainer: 2.6 GiB on an H200."""
MARGIN_BYTES = GIB // 2
SLEEPING_BYTES = TRAINER_RESIDUE_BYTES + MARGIN_BYTES
TRAINING_SLACK_BYTES = 6 * GIB
"""Safety margin on the estimate of the trainer's peak."""
NUM_LORA_SLOTS = 2
"""Adapter slots of the engine on the GPU; no plan releases them."""
HOST_SHARE = 2.0
"""Host memory that plan offload needs, as a multiple of the weights. The trainer may hold a copy too."""
DEADLINE_S: dict[ColocationPlan, float] = {"keep_weights": 20, "offload": 120, "reload": 20, "restart": 60, "separate_gpus": 0}
"""Seconds until NVML must report a plan's memory as free. offload copies at 3 GB/s."""


class Machine(NamedTuple):
    is_gpu: bool
    gpu_bytes: int
    """Memory of the smallest GPU."""
    is_split: bool
    host_bytes: int
    """Memory of the host."""
    judge_bytes: int = 0
    """Memory of each GPU that the sleeping server of a second model that judges keeps."""


class Colocation(NamedTuple):
    """How a run shares the GPUs of this machine."""

    engine: EngineConfig
    """With the plan for colocation `auto`."""
    trainer: TrainerConfig
    """With the mode for `auto`, the place for sleep_weights `auto`, and a number for max_tokens_per_microbatch."""
    plan: Plan


def this_machine() -> Machine:
    gpus = nvml.read().gpus
    smallest = min((gpu.total_bytes for gpu in gpus), default=0)
    return Machine(bool(gpus), smallest, settings().is_split, psutil.virtual_memory().total)


def machine_of(config: RunConfig) -> Machine:
    """This machine, with what a judge's sleeping server keeps of it."""
    machine, judge = this_machine(), config.reward.judge
    if not config.reward.has_judge_server or not machine.is_gpu:
        return machine
    model = model_in(base_model.locate(judge.model))
    kept = residue_bytes(judge_section.plan_of(judge), judge_section.server_of(config.engine, judge), model)
    return machine._replace(judge_bytes=kept)


def plan(config: RunConfig) -> Plan:
    """The plan of a run on this machine.

    Raises:
        ValueError: for a plan that cannot be carried out here.
    """
    given = devices.plan(config.engine)
    if devices.device() == "cpu" or config.engine.colocation != "auto" or config.engine.kind != "sglang":
        return given
    return choose(config.engine, config.trainer, model_in(base_model.locate(config.model)), machine_of(config))


def resolve_colocation(config: RunConfig) -> Colocation:
    """Resolve what the run's configuration leaves to the machine: once a step, which hands it to its tasks.

    Raises:
        ValueError: for a plan that cannot be carried out here.
    """
    chosen = plan(config)
    engine = config.engine.but(colocation=chosen.colocation)
    trainer = config.trainer.but(mode=_mode(config, engine))
    trainer = _with_idle_weights(config, engine, trainer)
    size = _microbatch(config, engine, trainer)
    trainer = trainer.but(max_tokens_per_microbatch=size.tokens)
    return Colocation(engine, trainer, chosen._replace(microbatches=size.reason, judge=_turns_of_judge(config, engine, trainer)))


def _turns_of_judge(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig) -> str:
    from infra.colocation import judge  # which is made of this module's sizes

    return judge.words(config, engine, trainer, this_machine()) if config.reward.has_judge_server else ""


def _microbatch(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig) -> microbatch.Size:
    asked, longest = trainer.max_tokens_per_microbatch, config.longest_sequence_tokens
    if asked is not None:
        return microbatch.Size(asked, f"{asked} tokens, as chosen in trainer.max_tokens_per_microbatch")
    if devices.device() == "cpu":
        return microbatch.Size(
            max(trainer.microbatch_tokens, longest), f"{max(trainer.microbatch_tokens, longest)} tokens, on a CPU"
        )
    model, machine = model_in(base_model.locate(config.model)), machine_of(config)
    return microbatch.largest(trainer, model, room_bytes=left_to_trainer_bytes(engine, model, machine), longest=longest)


def left_to_trainer_bytes(engine: EngineConfig, model: Model, machine: Machine) -> int:
    """Memory of each GPU that the engine's colocation plan leaves to the trainer."""
    kept = 0 if engine.colocation == "separate_gpus" else residue_bytes(engine.colocation, engine, model)  # type: ignore[arg-type]
    return machine.gpu_bytes - kept - machine.judge_bytes


def _mode(config: RunConfig, engine: EngineConfig) -> Literal["per_step", "persistent"]:
    if config.trainer.mode != "auto":
        return config.trainer.mode
    if settings().trainer_nodes > 1 or settings().cluster_address:
        return "per_step"
    return "persistent" if devices.device() == "cpu" or sleeps_beside(engine, machine_of(config)) else "per_step"


def sleeps_beside(engine: EngineConfig, machine: Machine) -> bool:
    """Whether a sleeping trainer without its weights fits on the GPU while the engine samples. On a CPU it takes nothing that training does not."""
    return engine.colocation == "separate_gpus" or at_work_bytes(engine, machine) + SLEEPING_BYTES <= machine.gpu_bytes


def at_work_bytes(engine: EngineConfig, machine: Machine) -> float:
    """Memory on each of an engine's GPUs while it samples, with what a sleeping judge keeps."""
    residue = ENGINE_RESIDUE_BYTES + (PARALLEL_RESIDUE_BYTES if engine.tensor_parallel > 1 else 0)
    return engine.memory_fraction * machine.gpu_bytes + residue + machine.judge_bytes


def _with_idle_weights(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig) -> TrainerConfig:
    if trainer.sleep_weights != "auto":
        return trainer
    on_gpu = trainer.mode == "persistent" and devices.device() == "cuda"
    on_gpu = on_gpu and idles_on_gpu(engine, trainer, model_in(base_model.locate(config.model)), machine_of(config))
    return trainer.but(sleep_weights="gpu" if on_gpu else "host")


def idles_on_gpu(engine: EngineConfig, trainer: TrainerConfig, model: Model, machine: Machine) -> bool:
    """Whether the weights of a sleeping trainer fit on the GPU while the engine samples, under the engine's colocation plan.

    7B on an H200: 114.3 and 16.7 of 139.8 GiB. Under plan restart they never do: the engine starts again in each step and needs the memory.
    """
    if engine.colocation in ("separate_gpus", "restart"):
        return engine.colocation == "separate_gpus"
    return at_work_bytes(engine, machine) + held_bytes(trainer, model) + SLEEPING_BYTES <= machine.gpu_bytes


def choose(engine: EngineConfig, trainer: TrainerConfig, model: Model, machine: Machine) -> Plan:
    """Choose the cheapest plan that fits.

    keep_weights < 0.1 s, reload 2 to 3 s at 7B, offload 6 s, restart half a minute and more: a plan that frees more is taken only where
    the one before leaves the trainer too little.
    """
    if machine.is_split:
        return Plan("separate_gpus", devices.SPLIT_REASON)
    total = machine.gpu_bytes
    need = trainer_peak_bytes(trainer, model) + TRAINING_SLACK_BYTES + machine.judge_bytes
    asks = f"the trainer needs about {need / GIB:.0f} GiB of a GPU with {total / GIB:.0f} GiB"
    asks += f", {machine.judge_bytes / GIB:.0f} of them for the judge that sleeps there" if machine.judge_bytes else ""
    awake, asleep = (residue_bytes(name, engine, model) for name in ("keep_weights", "reload"))
    if need + awake <= total:
        return Plan(
            "keep_weights", f"{asks}, beside it the engine can keep its {awake / GIB:.0f} GiB: only the KV cache is released"
        )
    if need + asleep <= total:
        does_not_fit = f"{asks}, the engine's {awake / GIB:.0f} GiB do not fit beside it"
        if not passed_over(engine, trainer.lora, model.architecture):
            return Plan(
                "reload",
                f"{does_not_fit}: its weights are dropped and read again from disk, which is faster than a copy on the host",
            )
        why = f"{does_not_fit}, and SGLang would not read experts with adapters again"
        if HOST_SHARE * model.weight_bytes <= machine.host_bytes:
            return Plan("offload", f"{why}: its weights are copied to the host and back")
        return Plan("restart", f"{why}; the host has no room for a copy of them: the server ends")
    return Plan("restart", f"{asks}, not even the {asleep / GIB:.0f} GiB of a sleeping engine fit beside it: the server ends")


def passed_over(engine: EngineConfig, lora: LoraConfig, a: Architecture) -> tuple[str, ...]:
    """Target modules whose weights SGLang silently leaves out of a reload: experts that carry adapters.

    In 0.5.17 and 0.5.18 models/qwen3_moe.py looks for `experts.w13_weight` and skips what it does not find, while FusedMoEWithLoRA of
    lora/layers.py has moved it to `experts.base_layer.w13_weight`.
    """
    on_experts = tuple(name for name in lora.target_modules if name not in ATTENTION)
    return on_experts if a.experts and engine.kind == "sglang" and engine.lora_mode == "adapter" else ()


def residue_bytes(colocation: ColocationPlan, engine: EngineConfig, model: Model, kv_cache_tokens: int = 0) -> int:
    """Memory that an engine may still hold on each of its GPUs after the plan's release. separate_gpus releases nothing."""
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
    return cache if colocation == "keep_weights" else cache + weight_bytes(engine.dtype, model) // engine.tensor_parallel


def kv_cache_bytes(engine: EngineConfig, a: Architecture, num_tokens: int) -> int:
    """Bytes of the keys and values of num_tokens tokens, on each GPU."""
    a_value = 4 if devices.dtype_of(engine.dtype) == "float32" else 2
    if any(flag.startswith("--kv-cache-dtype") for flag in engine.extra_flags):  # of one byte, for all that is known here
        a_value = 1
    heads = max(1, a.num_kv_heads // engine.tensor_parallel)
    return 2 * a.num_layers * heads * a.head_dim * a_value * num_tokens


def lora_pool_bytes(engine: EngineConfig, model: Model) -> int:
    """Slots for adapters of the largest rank on all linear layers, on each GPU, as if nothing of them were split."""
    return NUM_LORA_SLOTS * 2 * num_lora_parameters(engine.max_lora_rank, ALL_LINEAR, model.architecture)
