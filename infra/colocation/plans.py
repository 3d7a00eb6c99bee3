"""How engine and trainer share the GPUs: which plan, why, and what each plan must free. docs/colocation.md has the table.

The choice depends on the machine and the configuration only, never on what happens to be free: every process of a run comes to the
same plan, so that the engine's flags, and with them the living engine, stay the same.
"""

import math
from typing import Literal, NamedTuple

from infra.colocation import host_memory, judge, judge_section, microbatch
from infra.colocation.engine_memory import at_work_bytes, cached_sequences, residue_bytes
from infra.colocation.machine import GIB, Machine, this_machine
from infra.colocation.trainer_memory import (
    SLEEPING_BYTES,
    TRAINING_SLACK_BYTES,
    Model,
    held_bytes,
    model_in,
    trainer_peak_bytes,
    weight_bytes,
)
from infra.config import (
    ATTENTION,
    MOST_RUNNING_REQUESTS,
    ColocationPlan,
    EngineConfig,
    LoraConfig,
    RunConfig,
    TrainerConfig,
)
from infra.machine import devices
from infra.machine.devices import Plan
from infra.models import base_model
from infra.models.architecture import Architecture
from infra.settings import settings

DEADLINE_S: dict[ColocationPlan, float] = {"keep_weights": 20, "offload": 120, "reload": 20, "restart": 60, "separate_gpus": 0}
"""Seconds until NVML must report a plan's memory as free. offload copies at 3 GB/s as long as its copy on the host is not page-locked."""


class Colocation(NamedTuple):
    """How a run shares the GPUs of this machine."""

    engine: EngineConfig
    """With the plan for colocation `auto`."""
    trainer: TrainerConfig
    """With the mode for `auto`, the place for sleep_weights `auto`, and a number for max_tokens_per_microbatch."""
    plan: Plan


def machine_of(config: RunConfig) -> Machine:
    """This machine, with what the model's files and a judge's sleeping server keep of it."""
    machine, judge = this_machine(), config.reward.judge
    if not machine.is_gpu:
        return machine
    files_bytes = host_memory.files_in_memory_bytes(base_model.locate(config.model))
    machine = machine._replace(model_files_bytes=files_bytes, replicas_per_gpu=devices.replicas_per_gpu(config.engine))
    if not config.reward.has_judge_server:
        return machine
    model, plan_of_judge = model_in(base_model.locate(judge.model)), judge_section.plan_of(judge)
    kept = residue_bytes(plan_of_judge, judge_section.server_of(config.engine, judge), model)
    copied = weight_bytes(judge.server.dtype, model) if plan_of_judge == "offload" else 0
    return machine._replace(judge_bytes=kept, judge_host_bytes=copied)


def host_parts(
    colocation: ColocationPlan, engine: EngineConfig, trainer: TrainerConfig, model: Model, machine: Machine
) -> dict[str, int]:
    """Bytes of the host that engine, trainer, judge and the model's files hold under a plan, by what holds them."""
    files_and_judge = {"files_bytes": machine.model_files_bytes, "judge_bytes": machine.judge_host_bytes}
    return host_memory.held(colocation, engine, trainer, model, **files_and_judge)


def check_host(config: RunConfig) -> None:
    """Raises ValueError if engine and trainer would hold more of the host's memory than they may."""
    machine = machine_of(config)
    if machine.is_gpu:
        engine, trainer, chosen = resolve_colocation(config)
        trainer = trainer.but(sleep_weights=config.trainer.sleep_weights)  # by itself it has a copy only where there is room
        parts = host_parts(chosen.colocation, engine, trainer, model_in(base_model.locate(config.model)), machine)
        host_memory.check(parts, machine.host_bytes)


def plan(config: RunConfig) -> Plan:
    """The plan of a run on this machine.

    Raises:
        ValueError: for a plan that cannot be carried out here.
    """
    given = devices.plan(config.engine)
    if given.colocation == "separate_gpus":
        check_own_gpus(config)
    if devices.device() == "cpu" or config.engine.colocation != "auto" or config.engine.kind != "sglang":
        return given
    return choose(config.engine, config.trainer, model_in(base_model.locate(config.model)), machine_of(config))


def check_own_gpus(config: RunConfig) -> None:
    """Check that engine and trainer have GPUs of their own, by the lists of the machine or by the layout.

    Raises:
        ValueError: if they share any, or the machine has too few.
    """
    if settings().is_split or config.engine.kind == "scripted":
        return
    if settings().cluster_address:
        raise ValueError(
            f"engine.colocation 'separate_gpus' with RATCHET_CLUSTER_ADDRESS {settings().cluster_address}: on a cluster engine and trainer share "
            "each node's GPUs, take 'auto'"
        )
    first, num_engine = config.trainer.first_gpu, devices.num_replicas(config.engine) * config.engine.tensor_parallel
    if not first:
        raise ValueError(
            "engine.colocation 'separate_gpus' needs GPUs for each: set RATCHET_ENGINE_GPUS and RATCHET_TRAINER_GPUS, such as [0] and [1]"
        )
    if first < num_engine:
        raise ValueError(f"trainer.first_gpu {first} is one of the engine's {num_engine} GPUs: set it to {num_engine} or more")
    if devices.device() == "cuda" and first + config.trainer.num_processes > devices.num_gpus():
        raise ValueError(
            f"trainer.first_gpu {first} with trainer.num_processes {config.trainer.num_processes} asks for "
            f"{first + config.trainer.num_processes} GPUs, there are {devices.num_gpus()}: lower one of them"
        )


def resolve_colocation(config: RunConfig) -> Colocation:
    """Resolve what the run's configuration leaves to the machine: once a step, which hands it to its tasks.

    Raises:
        ValueError: for a plan that cannot be carried out here.
    """
    chosen = plan(config)
    engine = config.engine.but(colocation=chosen.colocation, max_running_requests=_running_requests(config))
    trainer = config.trainer.but(mode=_mode(config, engine))
    trainer = _with_idle_weights(config, engine, trainer)
    size = _microbatch(config, engine, trainer)
    trainer = trainer.but(max_tokens_per_microbatch=size.tokens)
    return Colocation(engine, trainer, chosen._replace(microbatches=size.reason, judge=_turns_of_judge(config, engine, trainer)))


def _running_requests(config: RunConfig) -> int | None:
    """Samples that a replica has at a time: all of its share of a rollout, as far as its KV cache holds them at their longest."""
    engine, data, machine = config.engine, config.data, this_machine()
    if engine.max_running_requests is not None or devices.device() == "cpu" or not machine.is_gpu:
        return engine.max_running_requests
    samples = (data.num_prompts + data.num_oversampled_prompts) * config.sampling.group_size
    model = model_in(base_model.locate(config.model))
    held = cached_sequences(engine, model, machine.gpu_bytes, config.longest_sequence_tokens)
    return max(1, min(math.ceil(samples / devices.num_replicas(engine)), held, MOST_RUNNING_REQUESTS))


def _turns_of_judge(config: RunConfig, engine: EngineConfig, trainer: TrainerConfig) -> str:
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
    return machine.gpu_bytes - machine.replicas_per_gpu * kept - machine.judge_bytes


def _mode(config: RunConfig, engine: EngineConfig) -> Literal["per_step", "persistent"]:
    if config.trainer.mode != "auto":
        return config.trainer.mode
    if settings().cluster_address:
        return "per_step"
    if config.trainer.share_experts:
        return "persistent"
    return "persistent" if devices.device() == "cpu" or sleeps_beside(engine, machine_of(config)) else "per_step"


def sleeps_beside(engine: EngineConfig, machine: Machine) -> bool:
    """Whether a sleeping trainer without its weights fits on the GPU while the engine samples. On a CPU it takes nothing that training does not."""
    return engine.colocation == "separate_gpus" or at_work_bytes(engine, machine) + SLEEPING_BYTES <= machine.gpu_bytes


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
        if trainer.share_experts:
            raise ValueError(
                f"trainer.share_experts true needs one GPU for both, but {devices.SPLIT_REASON}: set it to false, or leave these lists empty"
            )
        return Plan("separate_gpus", devices.SPLIT_REASON)
    total = machine.gpu_bytes
    need = trainer_peak_bytes(trainer, model) + TRAINING_SLACK_BYTES + machine.judge_bytes
    asks = f"the trainer needs about {need / GIB:.0f} GiB of a GPU with {total / GIB:.0f} GiB"
    asks += f", {machine.judge_bytes / GIB:.0f} of them for the judge that sleeps there" if machine.judge_bytes else ""
    awake, asleep = (machine.replicas_per_gpu * residue_bytes(name, engine, model) for name in ("keep_weights", "reload"))
    if need + awake <= total:
        return Plan(
            "keep_weights", f"{asks}, beside it the engine can keep its {awake / GIB:.0f} GiB: only the KV cache is released"
        )
    if trainer.share_experts:
        raise ValueError(
            f"trainer.share_experts true needs the plan keep_weights: {asks}, the engine's {awake / GIB:.0f} GiB do not fit beside it; lower "
            "trainer.max_tokens_per_microbatch or engine.max_lora_rank, or set it to false"
        )
    if need + asleep <= total:
        does_not_fit = f"{asks}, the engine's {awake / GIB:.0f} GiB do not fit beside it"
        if not passed_over(engine, trainer.lora, model.architecture) and engine.quantization == "none":
            return Plan(
                "reload",
                f"{does_not_fit}: its weights are dropped and read again from disk, which is faster than a copy on the host",
            )
        unread = "cast weights that it reads again" if engine.quantization != "none" else "read experts with adapters again"
        why = f"{does_not_fit}, and SGLang would not {unread}"
        advice = _sharing_experts(engine, trainer, model, total - awake - machine.judge_bytes)
        if host_memory.fits(host_parts("offload", engine, trainer, model, machine), machine.host_bytes):
            return Plan("offload", f"{why}: its weights are copied to the host and back{advice}")
        return Plan("restart", f"{why}; the host has no room for a copy of them: the server ends{advice}")
    return Plan("restart", f"{asks}, not even the {asleep / GIB:.0f} GiB of a sleeping engine fit beside it: the server ends")


def _sharing_experts(engine: EngineConfig, trainer: TrainerConfig, model: Model, room_bytes: int) -> str:
    """Say that nothing would have to move if the trainer computed with the engine's experts, where that is possible."""
    is_possible = engine.quantization == "none" and trainer.num_processes == engine.tensor_parallel == 1
    if not is_possible or trainer_peak_bytes(trainer.but(share_experts=True), model) + TRAINING_SLACK_BYTES > room_bytes:
        return ""
    return "; with trainer.share_experts true both would compute with one copy, and none would move"


def passed_over(engine: EngineConfig, lora: LoraConfig, a: Architecture) -> tuple[str, ...]:
    """Target modules whose weights SGLang silently leaves out of a reload: experts that carry adapters.

    In 0.5.17 and 0.5.18 models/qwen3_moe.py looks for `experts.w13_weight` and skips what it does not find, while FusedMoEWithLoRA of
    lora/layers.py has moved it to `experts.base_layer.w13_weight`.
    """
    on_experts = tuple(name for name in lora.target_modules if name not in ATTENTION)
    return on_experts if a.experts and engine.kind == "sglang" and engine.lora_mode == "adapter" else ()


def check_quantization(config: RunConfig, a: Architecture) -> None:
    """Raises ValueError for quantized experts with adapters, with which SGLang crashes (sgl-project/sglang#31524)."""
    if config.engine.quantization != "none" and (names := passed_over(config.engine, config.trainer.lora, a)):
        raise ValueError(
            f"engine.quantization {config.engine.quantization!r} with trainer.lora.target_modules {', '.join(names)} of experts: SGLang cannot do "
            f"both, take {', '.join(ATTENTION)} or quantization 'none'"
        )
