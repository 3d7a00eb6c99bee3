"""Which layout of engine and trainer is probably the fastest on a number of GPUs: candidates that fit by the formulas of
infra.colocation, their seconds by the simulator."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, NamedTuple, Self

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field

from infra.colocation import engine_memory, plans
from infra.colocation.machine import Machine
from infra.colocation.trainer_memory import TRAINING_SLACK_BYTES, Model, num_lora_parameters, trainer_peak_bytes
from infra.config import MOST_RUNNING_REQUESTS, EngineConfig, LoraConfig, TrainerConfig
from infra.forecast.fit import Training, peak_bytes
from infra.forecast.rates import Rates, rates_of
from infra.forecast.remembered import layout_key
from infra.forecast.shapes import GPU_KINDS, MOST_GPUS, gpus_in, model_of
from infra.models.architecture import layout_problem
from infra.simulation.forecast import simulate
from infra.simulation.scenario import Scenario

GIB = 2**30
PARALLEL_EFFICIENCY = 0.85
"""Share of the speed that is left at each doubling of tensor or expert parallelism. 7B on two H200s: trainer 0.84, engine 0.72
(docs/results/h200-hand-over.md); more GPUs and other models were not measured."""
RECOMPUTE_SPEED = 10408 / 15064
"""7B on one H200, micro-batches of 8,192 tokens: tokens/s with full recomputation over those without."""
MICROBATCHES = (16384, 8192, 4096)
TO_TRAINING_S = 0.4
"""Seconds from the last sampled token to the first training kernel."""
TO_SAMPLING_S = {"keep_weights": 0.79, "reload": 3.0, "offload": 6.0, "restart": 47.0, "separate_gpus": 0.79}
"""Seconds from the last training kernel to the first sampled token, by colocation plan (docs/colocation.md, docs/results/speed.md)."""
EXPERTS_S = (3.7e-9, 17e-9)
"""Seconds more in each direction for each parameter of an adapter on experts: 30B-A3B at rank 8, plan keep_weights, one run on one H200."""


class PlannedStep(BaseModel):
    """What a step has to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_prompts: Annotated[int, Ge(1), Le(4096)] = Field(64, description="Prompts of a step.")
    group_size: Annotated[int, Ge(1), Le(256)] = Field(8, description="Samples of a prompt.")
    prompt_tokens: Annotated[int, Ge(1)] = Field(512, description="Tokens of a prompt.")
    output_tokens: Annotated[int, Ge(1)] = Field(
        512, description="Tokens of a sample, prompt not counted; all are taken as equal."
    )
    rank: Annotated[int, Ge(1)] = Field(16, description="Rank of the LoRA adapter.")
    max_staleness: Annotated[int, Ge(0), Le(16)] = Field(
        1, description="RL steps by which samples may be older than the adapter, 0 to 16; 0: on-policy only."
    )
    host_gib: Annotated[float, Ge(1)] = Field(256.0, description="Memory of the host, GiB; plan offload needs twice the weights.")

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def num_rows(self) -> int:
        """Tokens that the trainer computes: each prompt once."""
        return self.num_prompts * (self.prompt_tokens + self.group_size * self.output_tokens)


class Given(NamedTuple):
    """What is decided before the layout is planned."""

    engine: EngineConfig
    trainer: TrainerConfig
    fixed: Mapping[str, object] = {}
    """Field such as `engine.tensor_parallel` -> value that was set by hand: only layouts with it are planned."""
    own_gpus: tuple[int, int] | None = None
    """GPUs of the engine and of the trainer, where both have their own by hand."""
    measured: Mapping[str, Rates] = {}
    """Rates of layouts that ran on this machine, by `layout_key`."""

    @classmethod
    def of(cls, work: PlannedStep) -> Self:
        """Nothing is decided but the step."""
        sizes = {"max_lora_rank": work.rank, "max_context_tokens": max(16, work.sequence_tokens)}
        engine = EngineConfig(dtype="bfloat16").but(**sizes)
        return cls(engine, TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=work.rank)))

    def allows(self, engine: EngineConfig, trainer: TrainerConfig) -> bool:
        sections = {"engine": engine, "trainer": trainer}
        values = {field: getattr(sections[section], name) for field in self.fixed for section, _, name in [field.partition(".")]}
        return values == dict(self.fixed)


class Candidate(NamedTuple):
    """A layout that fits."""

    engine_gpus: int
    trainer_gpus: int
    is_split: bool
    """Engine and trainer have GPUs of their own."""
    engine: EngineConfig
    trainer: TrainerConfig
    engine_gib: float
    """Of each engine GPU while it samples."""
    trainer_gib: float
    """Of each trainer GPU at the peak of training, with what a colocated engine keeps."""
    scenario: Scenario
    rates: Rates
    work: PlannedStep
    kind: str
    """Of the GPUs."""


class Planned(NamedTuple):
    candidate: Candidate

    @property
    def step_s(self) -> float:
        """The engine makes one rollout at a time; the simulator would begin the next one in what is left of its GPUs."""
        found = simulated(self.candidate.scenario)
        return max(found, self.rollout_s) if self.candidate.is_split else found

    @property
    def gpu_idle_share(self) -> float:
        """Share of the used GPUs' seconds in which neither part computes, 0 to 1."""
        c = self.candidate
        busy_s = self.rollout_s * c.engine_gpus + self.train_s * c.trainer_gpus
        return max(0.0, 1 - busy_s / (self.step_s * c.scenario.gpus))

    @property
    def train_s(self) -> float:
        """Of a step's training."""
        s = self.candidate.scenario
        tokens = s.num_samples * (s.prompt_tokens + s.max_tokens)
        return tokens / (s.trainer_tokens_per_s * self.candidate.trainer_gpus)

    @property
    def rollout_s(self) -> float:
        """Of a step's rollout, with nothing else beside it."""
        s = self.candidate.scenario
        return simulated(s.but(max_staleness=0)) - self.train_s - s.to_training_s - s.to_sampling_s


class MachinePlan(NamedTuple):
    best: list[Planned]
    """The three fastest ways to share the GPUs, or as many as fit; of each its fastest layout."""
    on_policy: Planned | None
    """The fastest whose samples are never older than the adapter."""
    rates: Rates


def plan_machine(gpus: str, model_name: str, work: PlannedStep) -> MachinePlan:
    """The best layouts on GPUs such as 8xH100.

    Raises:
        ValueError: for unknown GPUs or models, and where no layout fits.
    """
    count, kind = gpus_in(gpus)
    model = model_of(model_name)
    rates = rates_of(model, kind)
    found = best_of(candidates(count, kind, model, work, rates), rates)
    if not found.best:
        total = GPU_KINDS[kind].memory_bytes / GIB
        raise ValueError(
            f"--gpus {gpus}: no layout of {model_name} with {work.sequence_tokens} tokens a sample fits into {total:.0f} GiB a GPU; "
            f"{_would_fit(count, kind, model, work)}"
        )
    return found


def _would_fit(count: int, kind: str, model: Model, work: PlannedStep) -> str:
    """Say which larger machines would do: the smallest of each kind."""
    larger = {k: range(count + 1 if k == kind else 1, MOST_GPUS + 1) for k in (kind, *sorted({*GPU_KINDS} - {kind}))}
    fitting = {k: [n for n in larger[k] if any(candidates(n, k, model, work, rates_of(model, k)))] for k in larger}
    if enough := [f"{numbers[0]}x{k}" for k, numbers in fitting.items() if numbers]:
        return f"{' or '.join(enough)} would do, or fewer tokens a sample"
    return f"none fits on {MOST_GPUS} GPUs of any known kind, take fewer tokens a sample or a smaller model"


def best_of(fitting: Iterator[Candidate], rates: Rates) -> MachinePlan:
    """The three fastest ways to share the GPUs among the layouts that fit; none, if none does."""
    found = sorted((Planned(each) for each in fitting), key=_order)
    shares = {(c.engine_gpus, c.trainer_gpus, c.is_split): p for p in reversed(found) for c in [p.candidate]}
    on_policy = next((planned for planned in found if not planned.candidate.is_split), None)
    return MachinePlan(sorted(shares.values(), key=_order)[:3], on_policy, rates)


def _order(planned: Planned) -> tuple[float, ...]:
    """By seconds; equal ones on-policy first, then by fewer GPUs and simpler layouts."""
    c = planned.candidate
    return (
        round(planned.step_s, 2),
        c.is_split,
        c.engine_gpus + c.trainer_gpus,
        c.engine.tensor_parallel,
        c.trainer.tensor_parallel,
    )


@cache
def simulated(scenario: Scenario) -> float:
    """Seconds of a step."""
    return simulate(scenario).step_s


def candidates(
    count: int, kind: str, model: Model, work: PlannedStep, rates: Rates, given: Given | None = None
) -> Iterator[Candidate]:
    """All layouts that fit on up to `count` GPUs."""
    given = given or Given.of(work)
    for engine_gpus, trainer_gpus, is_split in _shares(count, work, given):
        for engine in _engines(engine_gpus, model, work, given):
            trainers = _trainers(trainer_gpus, model, work, given)
            fitting = (_fitted(t, engine, kind, model, work, is_split) for t in trainers if given.allows(engine, t))
            for trainer, plan_engine in filter(None, fitting):
                yield _candidate((engine_gpus, trainer_gpus, is_split), plan_engine, trainer, kind, model, work, rates, given)


def _shares(count: int, work: PlannedStep, given: Given) -> Iterator[tuple[int, int, bool]]:
    """GPUs of the engine, GPUs of the trainer, and whether these are others."""
    if given.own_gpus:
        most_engine, most_trainer = given.own_gpus
        yield from ((e, t, True) for e in range(1, most_engine + 1) for t in range(1, most_trainer + 1))
        return
    if given.trainer.share_experts:  # one GPU holds them, for both
        yield 1, 1, False
        return
    colocation = given.engine.colocation
    for used in range(1, count + 1):
        if colocation != "separate_gpus":
            yield used, used, False
        if work.max_staleness and colocation in ("auto", "separate_gpus"):
            yield from ((used - n, n, True) for n in range(1, used))


def _engines(gpus: int, model: Model, work: PlannedStep, given: Given) -> Iterator[EngineConfig]:
    a = model.architecture
    for size in range(1, gpus + 1):
        divides = gpus % size == 0 and a.num_kv_heads % size == 0 and a.num_heads % size == 0
        if divides and gpus // size <= work.num_prompts:
            yield given.engine.but(tensor_parallel=size, replicas=gpus // size)


def _trainers(gpus: int, model: Model, work: PlannedStep, given: Given) -> Iterator[TrainerConfig]:
    """Layouts by tensor, expert and data parallelism."""
    for tp in range(1, gpus + 1):
        for ep in (1, gpus) if model.architecture.experts and gpus > 1 else (1,):
            layout = {"num_processes": gpus, "tensor_parallel": tp, "expert_parallel": ep, "sequence_parallel": tp > 1}
            has_work = gpus // tp <= work.num_prompts
            if gpus % tp == 0 and has_work and layout_problem(model.architecture, **layout) is None:  # type: ignore[arg-type]
                yield given.trainer.but(**layout)


def _fitted(
    trainer: TrainerConfig, engine: EngineConfig, kind: str, model: Model, work: PlannedStep, is_split: bool
) -> tuple[TrainerConfig, EngineConfig] | None:
    """The trainer with the largest micro-batch that fits, recomputed where it must; and the engine with its colocation plan. A smaller
    micro-batch is taken for a faster hand-over, and recomputation rather than a restart of the engine in each step."""
    if _running(engine, kind, model, work) < 1:
        return None
    machine = Machine(True, GPU_KINDS[kind].memory_bytes, is_split, int(work.host_gib * GIB))
    sizes = [size for size in MICROBATCHES if size >= work.sequence_tokens] or [work.sequence_tokens]
    sizes = [trainer.max_tokens_per_microbatch] if trainer.max_tokens_per_microbatch else sizes
    again = (True,) if trainer.recompute else (False, True)
    tried = [trainer.but(max_tokens_per_microbatch=size, recompute=recompute) for recompute in again for size in sizes]
    fitting = [t for t in tried if trainer_peak_bytes(t, model) + TRAINING_SLACK_BYTES <= machine.gpu_bytes]
    chosen = [(t, shared) for t in fitting if (shared := _shared(engine, t, model, machine))]
    return min(chosen, key=lambda pair: TO_SAMPLING_S[pair[1].colocation] / 10 + pair[0].recompute, default=None)


def _shared(engine: EngineConfig, trainer: TrainerConfig, model: Model, machine: Machine) -> EngineConfig | None:
    """The engine with its colocation plan; one that was set by hand stays. None: it cannot keep the experts that it shares beside this trainer."""
    if engine.colocation not in ("auto", "separate_gpus"):
        return engine
    try:
        return engine.but(colocation=plans.choose(engine, trainer, model, machine).colocation)
    except ValueError:
        if not trainer.share_experts:
            raise
        return None


def _running(engine: EngineConfig, kind: str, model: Model, work: PlannedStep) -> int:
    """Samples that a replica may have at a time, and its KV cache has room for."""
    held = engine_memory.cached_sequences(engine, model, GPU_KINDS[kind].memory_bytes, work.sequence_tokens)
    return min(engine.max_running_requests or MOST_RUNNING_REQUESTS, held)


def _candidate(
    gpus: tuple[int, int, bool],
    engine: EngineConfig,
    trainer: TrainerConfig,
    kind: str,
    model: Model,
    work: PlannedStep,
    rates: Rates,
    given: Given,
) -> Candidate:
    engine_gpus, trainer_gpus, is_split = gpus
    total = GPU_KINDS[kind].memory_bytes
    running = min(_running(engine, kind, model, work), work.num_prompts * work.group_size)
    engine = engine.but(max_running_requests=running)
    kept = 0 if is_split else engine_memory.residue_bytes(engine.colocation, engine, model)  # type: ignore[arg-type]
    own = given.measured.get(layout_key(engine, trainer))
    used = own or rates
    engine_left = 1.0 if own else _left(engine.tensor_parallel)
    row_rate = used.trainer_rows_per_s * (1.0 if own else _left(trainer.tensor_parallel * trainer.expert_parallel))
    row_rate *= RECOMPUTE_SPEED if trainer.recompute and not own else 1
    num_tokens = work.num_prompts * work.group_size * work.sequence_tokens
    on_experts = num_lora_parameters(trainer.lora.rank, trainer.lora.target_modules, model.architecture, only=".experts.")
    scenario = Scenario(
        gpus=engine_gpus + (trainer_gpus if is_split else 0),
        trainer_gpus=trainer_gpus if is_split else 0,
        tensor_parallel=engine.tensor_parallel,
        max_staleness=work.max_staleness if is_split else 0,
        num_steps=2,
        num_prompts=work.num_prompts,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        mean_tokens=work.output_tokens,
        log_spread=0,
        max_tokens=work.output_tokens,
        max_running_requests=running,
        request_tokens_per_s=used.request_tokens_per_s,
        replica_tokens_per_s=used.engine_tokens_per_s * engine.tensor_parallel * engine_left,
        trainer_tokens_per_s=row_rate * num_tokens / work.num_rows,
        trainer_fixed_s=0,
        to_training_s=TO_TRAINING_S + EXPERTS_S[0] * on_experts,
        to_sampling_s=TO_SAMPLING_S[engine.colocation] + EXPERTS_S[1] * on_experts,
    )
    awake = engine.memory_fraction * total + engine_memory.ENGINE_RESIDUE_BYTES
    awake += engine_memory.PARALLEL_RESIDUE_BYTES if engine.tensor_parallel > 1 else 0
    at_peak = peak_bytes(trainer, model, work_on(trainer, work)) + kept
    gibs = awake / GIB, at_peak / GIB
    return Candidate(engine_gpus, trainer_gpus, is_split, engine, trainer, *gibs, scenario, used, work, kind)


def work_on(trainer: TrainerConfig, work: PlannedStep) -> Training:
    """What each of the trainer's GPUs computes in a step: whole groups in a micro-batch, as many as fit."""
    ranks = trainer.num_processes // trainer.tensor_parallel
    group = work.num_rows / work.num_prompts
    per_batch = max(1.0, trainer.microbatch_tokens // group)
    groups = min(per_batch, -(-work.num_prompts // ranks))
    rows = min(groups * group, float(max(trainer.microbatch_tokens, work.sequence_tokens)))
    share = work.output_tokens * work.group_size / group
    return Training(work.num_rows / ranks, work.num_rows / ranks * share, work.sequence_tokens, rows, rows * share)


def _left(size: int) -> float:
    return float(PARALLEL_EFFICIENCY ** (size.bit_length() - 1))
