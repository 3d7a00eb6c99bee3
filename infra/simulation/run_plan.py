"""The layout of a run: planned by `machine_plan` when it begins on several GPUs, with what was set by hand, and the forecast of its step."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from infra.colocation import engine_memory, microbatch, plans
from infra.colocation.machine import Machine
from infra.colocation.trainer_memory import Model
from infra.config import RunConfig, TrainerConfig
from infra.config.sections.trainer import DEFAULT_MICROBATCH_TOKENS
from infra.config.tools.overrides import changed, flattened
from infra.forecast import remembered
from infra.forecast.fit import FORWARD, peak_bytes
from infra.forecast.rates import Rates, rates_of
from infra.forecast.remembered import MEASURED_HERE, MeasuredRates, layout_key
from infra.forecast.shapes import GPU_KINDS
from infra.forecast.step_forecast import StepForecast, by_measured
from infra.simulation.machine_plan import GIB, Candidate, Given, MachinePlan, Planned, PlannedStep, best_of, candidates, work_on
from infra.simulation.plan_words import lines_of, sharing

Values = dict[str, Any]  # Any: what fields of a configuration hold

FIELDS = (
    *("engine.tensor_parallel", "engine.replicas", "engine.colocation", "trainer.num_processes", "trainer.tensor_parallel"),
    *("trainer.sequence_parallel", "trainer.expert_parallel", "trainer.recompute", "trainer.first_gpu"),
    "trainer.max_tokens_per_microbatch",
)
"""What a layout is. A field that is not at its default was set by hand."""
DEFAULTS: Values = {name: value for name, value in flattened(RunConfig().model_dump()).items() if name in FIELDS}
SAME_MEMORY = 0.97
"""Share of a data sheet's memory from which a GPU counts as that one: a slice of it has less."""


class Host(NamedTuple):
    """The machine that a run begins on."""

    num_gpus: int
    """GPUs that the run may use."""
    kind: str
    """A name of GPU_KINDS."""
    host_bytes: int
    own_gpus: tuple[int, int] | None = None
    """GPUs of the engine and of the trainer, where RATCHET_ENGINE_GPUS and RATCHET_TRAINER_GPUS share none."""


class PlannedLayout(BaseModel):
    """What was planned for a run: layout.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fields: Values
    """Field -> value, all of them."""
    by_hand: Values
    lines: tuple[str, ...]
    """The three best with their reasons, for people."""
    forecast: StepForecast

    @property
    def words(self) -> str:
        """In one line."""
        hand = ", ".join(f"{name} {value}" for name, value in self.by_hand.items())
        return f"{self.forecast.sharing}{f' (set by hand: {hand})' if hand else ''}"


def kind_of(name: str, memory_bytes: int) -> str | None:
    """The kind of a GPU by its name and memory as NVML reports them; None: none that the plan knows."""
    fitting = (kind for kind, gpu in GPU_KINDS.items() if kind in name and memory_bytes >= SAME_MEMORY * gpu.memory_bytes)
    return next(fitting, None)


def values_in(config: RunConfig) -> Values:
    return {name: value for name, value in flattened(config.model_dump()).items() if name in FIELDS}


def set_by_hand(config: RunConfig) -> Values:
    """Fields of the layout that are not at their default. engine.replicas None leaves the number open."""
    found = {name: value for name, value in values_in(config).items() if value != DEFAULTS[name]}
    return {name: value for name, value in found.items() if value is not None}


def with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    return changed(config, [f"{name}={json.dumps(value)}" for name, value in values.items()])


def kept(config: RunConfig, begun: RunConfig) -> RunConfig:
    """The configuration with the layout that its run was begun with; what is set by hand now wins."""
    return with_values(config, values_in(begun) | set_by_hand(config))


def plan_run(config: RunConfig, host: Host, model: Model) -> tuple[RunConfig, PlannedLayout]:
    """The configuration with the fastest layout that fits, and what to keep of the plan.

    Raises:
        ValueError: if no layout fits; names what was set by hand and is in the way.
    """
    by_hand = set_by_hand(config)
    found = planned(config, host, model, by_hand)
    if not found.best:
        raise ValueError(_why_none(config, host, model, by_hand))
    first = found.best[0]
    values = _values_of(first.candidate, config, host)
    title = f"layout auto on {host.num_gpus} x {host.kind}" + "".join(
        f"; {name} {value} by hand" for name, value in by_hand.items()
    )
    forecast = forecast_of(first, model, config)
    return with_values(config, values), PlannedLayout(
        fields=values, by_hand=by_hand, lines=(title, *lines_of(found)), forecast=forecast
    )


def forecast_on(config: RunConfig, host: Host, model: Model) -> StepForecast | None:
    """The forecast of a run whose layout is given; None where it does not fit by the estimate."""
    found = planned(config, host, model, values_in(config) | set_by_hand(config)).best
    return forecast_of(found[0], model, config) if found else None


def forecast_by_measured(config: RunConfig, model: Model) -> StepForecast | None:
    """The forecast where nothing is known but what an earlier run measured in the same layout, as on a CPU; None without one."""
    key = layout_key(config.engine, config.trainer)
    found = remembered.measured_of(config, model).get(key)
    if found is None:
        return None
    work = work_of(config, None)
    sizes = {"num_prompts": work.num_prompts, "group_size": work.group_size, "prompt_tokens": work.prompt_tokens}
    return StepForecast(parts=by_measured(found, **sizes), source=f"{MEASURED_HERE}{found.run}", sharing=key)


def planned(config: RunConfig, host: Host, model: Model, values: Mapping[str, object]) -> MachinePlan:
    """The best layouts with these values."""
    known = remembered.measured_of(config, model)
    work = work_of(config, _lengths(known), host)
    estimated = rates_of(model, host.kind)
    if estimated.source.startswith("estimated"):
        estimated = estimated._replace(trainer_rows_per_s=estimated.trainer_rows_per_s / _passes(config))
    rates = _of_nearest(known, estimated)
    first_gpu = values.get("trainer.first_gpu")
    given = Given(
        config.engine.but(dtype="bfloat16"),
        config.trainer.but(dtype="bfloat16"),
        fixed={name: value for name, value in values.items() if name not in ("engine.colocation", "trainer.first_gpu")},
        own_gpus=host.own_gpus or ((int(str(first_gpu)), host.num_gpus - int(str(first_gpu))) if first_gpu else None),
        measured={layout: remembered.rates_by(each, estimated) for layout, each in known.items()},
    )
    return best_of(candidates(host.num_gpus, host.kind, model, work, rates, given), rates)


def work_of(config: RunConfig, output_tokens: float | None, host: Host | None = None) -> PlannedStep:
    """What a step of the run has to do.

    output_tokens: Mean of a sample, as it was measured; None: as long as it may be.
    """
    return PlannedStep.model_construct(  # a run may be larger than what the command line takes
        num_prompts=config.data.num_prompts,
        group_size=config.sampling.group_size,
        prompt_tokens=config.data.max_prompt_tokens,
        output_tokens=max(1, round(output_tokens or config.sampling.max_output_tokens)),
        rank=config.trainer.lora.rank,
        max_staleness=config.trainer.loss.correction.max_staleness,
        host_gib=host.host_bytes / GIB if host else 0.0,
    )


def _lengths(known: Mapping[str, MeasuredRates]) -> float | None:
    return next((each.mean_output_tokens for each in reversed(list(known.values()))), None)


def _of_nearest(known: Mapping[str, MeasuredRates], estimated: Rates) -> Rates:
    """Rates for layouts that did not run here: of one GPU, if it was measured, else estimates."""
    single = next((each for layout, each in known.items() if layout.startswith("engine 1 x TP 1; trainer 1, TP 1, EP 1")), None)
    return remembered.rates_by(single, estimated) if single else estimated


def _passes(config: RunConfig) -> float:
    """Passes over the batch, a forward and backward pass being one."""
    loss = config.trainer.loss
    return 1 + FORWARD * ((loss.kl.coefficient > 0) + (loss.correction.mode == "decoupled"))


def _values_of(c: Candidate, config: RunConfig, host: Host) -> Values:
    """The fields of the layout that a candidate stands for."""
    size = c.trainer.max_tokens_per_microbatch
    is_ours = c.is_split and host.own_gpus is None  # not by the machine's lists
    return {
        "engine.tensor_parallel": c.engine.tensor_parallel,
        "engine.replicas": c.engine.replicas,
        "engine.colocation": "separate_gpus" if is_ours else config.engine.colocation,
        "trainer.num_processes": c.trainer.num_processes,
        "trainer.tensor_parallel": c.trainer.tensor_parallel,
        "trainer.sequence_parallel": c.trainer.sequence_parallel,
        "trainer.expert_parallel": c.trainer.expert_parallel,
        "trainer.recompute": c.trainer.recompute,
        "trainer.first_gpu": (config.trainer.first_gpu or c.engine_gpus) if is_ours else 0,
        "trainer.max_tokens_per_microbatch": config.trainer.max_tokens_per_microbatch
        if size == DEFAULT_MICROBATCH_TOKENS
        else size,
    }


def _why_none(config: RunConfig, host: Host, model: Model, by_hand: Values) -> str:
    machine, way_out = f"{host.num_gpus} x {host.kind}", "or set layout to by_hand"
    blocking = [name for name in by_hand if planned(config, host, model, {k: v for k, v in by_hand.items() if k != name}).best]
    if blocking:
        named = ", ".join(f"{name} {by_hand[name]}" for name in blocking)
        return f"layout auto: no layout of model {config.model!r} on {machine} fits with {named}, set by hand: leave it out, {way_out}"
    hand = "".join(f", {name} {value}" for name, value in by_hand.items())
    total = GPU_KINDS[host.kind].memory_bytes / GIB
    return (
        f"layout auto: no layout of model {config.model!r} with {config.longest_sequence_tokens} tokens a sample{hand} fits on {machine} "
        f"of {total:.0f} GiB: shorten samples, use more GPUs, {way_out}"
    )


def _without(config: RunConfig, rates: Rates) -> str:
    """What changes a run's rates and is not in these. Those that this machine measured are of a run that has the same."""
    e, t = config.engine, config.trainer
    changes = {
        f"engine.quantization {e.quantization!r}": e.quantization != "none",
        f"engine.kv_cache_dtype {e.kv_cache_dtype!r}": e.kv_cache_dtype != "auto",
        "trainer.routing_replay": t.routing_replay,
        f"the turns of environment {config.environment.label!r}": bool(config.environment.label),
    }
    named = [name for name, is_there in changes.items() if is_there]
    return f"; without {' and '.join(named)}" if named and not rates.source.startswith(MEASURED_HERE) else ""


def forecast_of(first: Planned, model: Model, config: RunConfig) -> StepForecast:
    """Seconds and memory of a step by part. Memory is of each GPU; the KV cache is what the weights leave of the engine's share."""
    c = first.candidate
    weights = engine_memory.engine_weight_bytes(c.engine, model) / c.engine.tensor_parallel
    own = config.engine.memory_fraction * GPU_KINDS[c.kind].memory_bytes
    cache = own - weights - engine_memory.lora_pool_bytes(c.engine, model)
    trainer = _with_microbatch(c, model, config)
    s = c.scenario
    return StepForecast(
        parts={
            "rollout_s": first.rollout_s,
            "train_s": first.train_s,
            "hand_over_s": s.to_training_s + s.to_sampling_s,
            "step_s": first.step_s,
            "engine_weights_gib": weights / GIB,
            "kv_cache_gib": cache / GIB,
            "engine_gib": c.engine_gib,
            "trainer_peak_gib": peak_bytes(trainer, model, work_on(trainer, c.work)) / GIB,
        },
        source=c.rates.source + _without(config, c.rates),
        sharing=sharing(first),
        engine_gpus=c.engine_gpus,
        kv_token_bytes=engine_memory.kv_cache_bytes(c.engine, model.architecture, 1) / (c.engine.replicas or 1),
    )


def _with_microbatch(c: Candidate, model: Model, config: RunConfig) -> TrainerConfig:
    """The trainer with the micro-batch of its first step, where that is left to the machine: as large as the GPU has room for."""
    if config.trainer.max_tokens_per_microbatch or c.trainer.max_tokens_per_microbatch != DEFAULT_MICROBATCH_TOKENS:
        return c.trainer
    machine = Machine(True, GPU_KINDS[c.kind].memory_bytes, c.is_split, 0)
    room = plans.left_to_trainer_bytes(c.engine, model, machine)
    largest = microbatch.largest(c.trainer, model, room_bytes=room, longest=config.longest_sequence_tokens)
    return c.trainer.but(max_tokens_per_microbatch=largest.tokens)
