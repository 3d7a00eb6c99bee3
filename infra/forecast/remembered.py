"""Rates that this machine has measured, kept in the workspace by model, GPU and layout, for the next run's plan and forecast.

<workspace>/rates.json    {model and processor: {layout: MeasuredRates}}
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from infra.colocation.trainer_memory import Model
from infra.config import CPU_RUNNING_REQUESTS, MOST_RUNNING_REQUESTS, EngineConfig, RunConfig, TrainerConfig
from infra.forecast.rates import Rates
from infra.machine import devices
from infra.settings import settings
from infra.store.files import read_note, write_json
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

MEASURED_HERE = "measured in run "
FIRST_COUNTED = 1
"""Steps of a process before it do things for the first time: programs start, kernels are compiled."""


class MeasuredRates(BaseModel):
    """Medians of a run's steps after the first one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run: str
    num_steps: int
    """Steps that count."""
    running: float
    """Samples of each replica at a time."""
    engine_tokens_per_s: float
    """Sampled tokens, of each GPU of the engine."""
    trainer_rows_per_s: float
    """Of each GPU of the trainer, or of the CPU. Each prompt counts once per group, with data.max_prompt_tokens."""
    mean_output_tokens: float
    hand_over_s: float | None = None
    """From the last sampled token to the first training kernel, and back; None: not measured."""
    other_s: float
    """Seconds of a step beside rollout and training."""
    trainer_peak_gib: float
    """By the trainer's allocator on a GPU; its resident memory on a CPU."""
    engine_gib: float | None = None
    """Of all its processes while it samples."""


def layout_key(engine: EngineConfig, trainer: TrainerConfig) -> str:
    """The part of a layout that rates depend on, in words."""
    t = trainer
    own = ", own GPUs" if engine.colocation == "separate_gpus" else ""
    return (
        f"engine {devices.num_replicas(engine)} x TP {engine.tensor_parallel}; trainer {t.num_processes}, TP {t.tensor_parallel}, "
        f"EP {t.expert_parallel}{', recomputed' if t.recompute else ''}{own}"
    )


def measured_of(config: RunConfig, model: Model) -> dict[str, MeasuredRates]:
    """What this machine measured of such a model, by layout. A damaged file counts as none, with one line."""
    notes = read_note(Workspace.here().rates, dict[str, dict[str, MeasuredRates]]) or {}
    return notes.get(_key(config, model), {})


def remember(config: RunConfig, model: Model, steps: Sequence[Mapping[str, float]]) -> None:
    """Keep a run's medians for the next plan; nothing where too few steps were measured, or where replicas came and went with a cluster's nodes.

    steps: Figures of the steps in order, the first one of the process among them.
    """
    found = medians(config, steps)
    if found is None or (config.engine.replicas is None and settings().cluster_address):
        return
    notes = read_note(Workspace.here().rates, dict[str, dict[str, MeasuredRates]]) or {}
    notes.setdefault(_key(config, model), {})[layout_key(config.engine, config.trainer)] = found
    content = {key: {layout: each.model_dump() for layout, each in known.items()} for key, known in notes.items()}
    write_json(Workspace.here().rates, content)


def medians(config: RunConfig, steps: Sequence[Mapping[str, float]]) -> MeasuredRates | None:
    wanted: tuple[str, ...] = ("rollout/tokens_per_s", "rollout/output_tokens", "rollout/mean_output_tokens")
    wanted += ("time/roll_out_s", "time/train_s", "time/step_s")
    counted = [each for each in steps[FIRST_COUNTED:] if all(each.get(name, 0) > 0 for name in wanted)]
    if not counted:
        return None
    replicas, t = devices.num_replicas(config.engine), config.trainer
    most = CPU_RUNNING_REQUESTS if devices.device() == "cpu" else MOST_RUNNING_REQUESTS
    hand_over = _median(counted, "gpu_idle/to_training_s", "gpu_idle/to_sampling_s")
    samples = median(each["rollout/output_tokens"] / each["rollout/mean_output_tokens"] for each in counted)
    return MeasuredRates(
        run=config.name,
        num_steps=len(counted),
        running=min(samples / replicas, config.engine.max_running_requests or most),
        engine_tokens_per_s=median(each["rollout/tokens_per_s"] for each in counted) / replicas / config.engine.tensor_parallel,
        trainer_rows_per_s=median(_rows(config, each) / each["time/train_s"] for each in counted) / t.num_processes,
        mean_output_tokens=median(each["rollout/mean_output_tokens"] for each in counted),
        hand_over_s=hand_over if (hand_over or 0) > 0 else None,  # below 0: rollouts ran beside the training
        other_s=median(max(0.0, each["time/step_s"] - each["time/roll_out_s"] - each["time/train_s"]) for each in counted),
        trainer_peak_gib=max(each.get("memory/training_gib", 0.0) for each in counted),
        engine_gib=_median(counted, "memory/engine_inference_gib"),
    )


def _rows(config: RunConfig, figures: Mapping[str, float]) -> float:
    return config.data.num_prompts * config.data.max_prompt_tokens + figures["rollout/output_tokens"]


def _median(steps: Sequence[Mapping[str, float]], *names: str) -> float | None:
    sums = [sum(each[name] for name in names) for each in steps if all(name in each for name in names)]
    return median(sums) if sums else None


def rates_by(found: MeasuredRates, estimated: Rates | None = None) -> Rates:
    """The rates that a plan works with: at as many samples at a time as were measured, they give what was measured."""
    alone = found.engine_tokens_per_s / found.running
    return Rates(
        found.engine_tokens_per_s,
        max(alone, estimated.request_tokens_per_s if estimated else 0.0),
        found.trainer_rows_per_s,
        f"{MEASURED_HERE}{found.run}",
    )


def _key(config: RunConfig, model: Model) -> str:
    e, t = config.engine, config.trainer
    about = [model.architecture, model.weight_bytes, devices.processor(), e.kind, e.dtype, e.lora_mode, e.deterministic]
    about += [t.dtype, t.lora.rank, t.lora.target_modules, t.loss.kl.coefficient > 0, t.loss.correction.mode, t.num_minibatches]
    about += [e.quantization, e.kv_cache_dtype, t.share_experts, t.routing_replay, config.environment.label]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]
