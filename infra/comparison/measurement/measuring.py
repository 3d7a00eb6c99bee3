"""Measure one step of the RL loop with one engine: roll out, release, train, wake, load the next adapter.

An engine that does not answer is replaced and the step is retried, as in a run. This counts as an error of the engine. An engine
whose golden check or canary fails gets no figures at all.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from infra.comparison.config import Backend, Block, ComparisonConfig
from infra.comparison.measurement import load, reused_blocks
from infra.comparison.measurement.measures import EngineStart, Probe, Quality, StepMeasures
from infra.comparison.measurement.memory import GIB, MemoryTrace
from infra.comparison.paths import machine_for
from infra.data.prompts import Prompt
from infra.engines import health_checks, open_engine
from infra.engines.checked import CheckedEngine, wait_until_free
from infra.engines.interface import Engine, RolloutRequest, SampleSink
from infra.engines.request_timing import Load
from infra.engines.server import server_process
from infra.engines.server.server_engine import ServerEngine
from infra.failures import EngineUnavailable, WrongAnswer
from infra.machine import devices
from infra.models import base_model
from infra.processes.children import ProcessRef
from infra.records import AdapterVersion
from infra.store import check_costs
from infra.store.samples import Sample

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
FREE_DEADLINE_S = 120.0
BASELINE_SHARE = 0.05
"""Share of the GPUs' memory that may be in use while no engine runs."""

Train = Callable[[list[Sample]], str]
"""Train on the samples, or hold the memory. Returns the digest of the new adapter; empty if there is none."""
Grade = Callable[[Sequence[Sample], Sequence[Prompt]], list[float]]


class Clock:
    """Seconds of each part of a step. Golden checks and canaries are excluded and summed separately."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.checks_s = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        check_costs.taken()
        begin = time.perf_counter()
        yield
        elapsed, checks = time.perf_counter() - begin, sum(check_costs.taken().values())
        self.seconds[name] = elapsed - checks
        self.checks_s += checks


def program_of(engine: Engine) -> ServerEngine:
    assert isinstance(engine, CheckedEngine) and isinstance(engine.program, ServerEngine), "only servers are compared"
    return engine.program


def open_backend(config: ComparisonConfig, backend: Backend, adapter: AdapterVersion) -> Engine:
    """Return the engine of a backend. Its checks run after each load, so that their seconds can be subtracted from the load."""
    return open_engine(config.engine(backend), adapter, machine=machine_for(config, backend), checks_beside=False)


def ensure_started(
    engine: Engine, config: ComparisonConfig, block: Block, adapter: AdapterVersion, before: EngineStart | None
) -> EngineStart:
    """Make sure that the engine runs, is checked, has its adapter and is warm. A matching live engine is adopted; any other one of ours is ended.

    before: Measurements of its first start, which is the one that counts.
    """
    state = server_process.recorded()
    if before is not None and state is not None and state.identity == engine.identity and program_of(engine).is_running():
        engine.wake()
        engine.load_adapter(adapter)
        return before
    server_process.stop_recorded()
    # The golden check needs the tokenizer. Importing its library takes seconds, which would count in the start of the first engine.
    base_model.tokenizer(program_of(engine).model_folder)
    clock = Clock()
    with clock.part("wait"):
        wait_until_free(_used_frac, BASELINE_SHARE, FREE_DEADLINE_S)
    memory_before = devices.gpu_memory_used_bytes() / GIB
    with clock.part("start"):
        engine.wake()
    with clock.part("load"):
        engine.load_adapter(adapter)
    with clock.part("warm_up"):
        engine.generate(RolloutRequest(load.speed_prompts(config, program_of(engine).vocab_size, -1), config.warm_up, adapter))
    if before is not None:
        return before.model_copy(update={"num_starts": before.num_starts + 1})
    state, program = server_process.recorded(), program_of(engine)
    assert state is not None
    return EngineStart(
        backend=block.backend,
        round=block.round,
        **{f"{part}_s": seconds for part, seconds in clock.seconds.items()},
        checks_s=clock.checks_s,
        version=program.version(),
        flags=engine.flags,
        colocation=program.plan.colocation,
        reason=program.plan.reason,
        log_path=str(state.log_path),
        memory_before_gib=memory_before,
        kv_pool_tokens=program.kv_pool_tokens(),
        origin=reused_blocks.origin(),
    )


def _used_frac() -> float:
    total = devices.gpu_memory_total_bytes()
    return devices.gpu_memory_used_bytes() / total if total else 0.0


class LoopParts(NamedTuple):
    """The parts of a step that do not belong to an engine."""

    train: Train
    grade: Grade
    next_adapter: Callable[[], AdapterVersion]
    """Called after training."""


def measured_step(
    engine: Engine, config: ComparisonConfig, block: Block, step: int, adapter: AdapterVersion, parts: LoopParts
) -> StepMeasures:
    """Measure one step. Retried if the engine does not answer."""
    errors: list[str] = []
    lost_s, whole_begin = 0.0, time.perf_counter()
    about = {"backend": block.backend, "round": block.round, "step": step, "adapter_sha256": adapter.sha256}
    for _ in range(MAX_ATTEMPTS):
        begin = time.perf_counter()
        try:
            if errors:
                ensure_started(engine, config, block, adapter, None)
                lost_s += time.perf_counter() - begin
            made = _attempt(engine, config, step, adapter, parts)
            wall_s = time.perf_counter() - whole_begin
            return StepMeasures.model_validate(about | made | {"errors": errors, "lost_s": lost_s, "wall_s": wall_s})
        except WrongAnswer as error:
            log.error("%s, step %d: %s", block.name, step, error)
            return StepMeasures.model_validate(about | {"golden": str(error), "errors": [*errors, f"WrongAnswer: {error}"]})
        except EngineUnavailable as error:
            log.warning("%s, step %d: %s", block.name, step, error)
            errors.append(f"{type(error).__name__}: {error}")
            lost_s += time.perf_counter() - begin
            server_process.stop_recorded()
    return StepMeasures.model_validate(about | {"golden": "not reached: the engine does not answer", "errors": errors})


def _attempt(engine: Engine, config: ComparisonConfig, step: int, adapter: AdapterVersion, parts: LoopParts) -> dict[str, object]:
    program, trainer, clock = program_of(engine), _Trainer(), Clock()
    prompts, timings = load.speed_prompts(config, program.vocab_size, step), Load(config.concurrency)
    with MemoryTrace(also=trainer.process) as trace:
        with trace.phase("inference"), clock.part("rollout"):
            samples, _ = engine.generate(RolloutRequest(prompts, config.speed, adapter), SampleSink(load=timings))
        probe = _probe(program, adapter, prompts[0].prompt_tokens)
        quality = _quality(config, engine, adapter, parts.grade) if step == config.num_steps - 1 else None
        with clock.part("release"):
            engine.release_memory()
        with trace.phase("after_release"):
            pass
        with trace.phase("training"), clock.part("training"), trainer.noticed():
            trained = parts.train(samples)
        upcoming = parts.next_adapter()
        with clock.part("wake"):
            engine.wake()
        with clock.part("reload"):
            engine.load_adapter(upcoming)
    memory = {phase: found for phase in ("inference", "after_release", "training") if (found := trace.of(phase))}
    return {
        "requests": timings.requests,
        "rollout_s": timings.seconds,
        **{f"{part}_s": clock.seconds[part] for part in ("release", "training", "wake", "reload")},
        "checks_s": clock.checks_s,
        "kv_pool_tokens": program.kv_pool_tokens(),
        "memory": memory,
        "trace": [tuple(reading) for reading in trace.readings],
        "quality": quality,
        "probe": probe,
        "trained_sha256": trained,
    }


class _Trainer:
    """The current training program, or its stand-in. Without a GPU, its resident memory is measured too."""

    def __init__(self) -> None:
        self._refs: Callable[[], ProcessRef | None] = lambda: None

    def process(self) -> ProcessRef | None:
        return self._refs()

    @contextmanager
    def noticed(self) -> Iterator[None]:
        from infra.processes import gpu_programs

        self._refs = gpu_programs.running_without_state
        try:
            yield
        finally:
            self._refs = lambda: None


def _probe(program: ServerEngine, adapter: AdapterVersion, text: list[int]) -> Probe:
    """Score a fixed text. Raises WrongAnswer if the adapter changes nothing: then it is not served."""
    base, adapted = program.logprobs(text, None), program.logprobs(text, adapter.served_name)
    if health_checks.max_abs_difference(base, adapted) <= health_checks.VISIBLE_NATS[program.dtype]:
        raise WrongAnswer(f"adapter {adapter.served_name} changes nothing in the engine: it is not served")
    return Probe(base=base, adapter=adapted)


def _quality(config: ComparisonConfig, engine: Engine, adapter: AdapterVersion, grade: Grade) -> Quality | None:
    if not config.num_quality:
        return None
    prompts = load.quality_prompts(config, program_of(engine).model_folder)
    samples, _ = engine.generate(RolloutRequest(prompts, config.quality, adapter))
    rewards = grade(samples, prompts)
    return Quality(
        num_samples=len(samples),
        mean_output_tokens=sum(len(sample.output_tokens) for sample in samples) / len(samples),
        mean_reward=sum(rewards) / len(rewards),
        truncated_frac=sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    )
