"""The checks around an engine program. Every engine's answers pass through them.

load_adapter    golden check, prefix cache probe, canary; once for each load and each wake
generate        the requested adapter must be the served one; each sample is checked, then journaled; then the whole rollout, and the
                engine once more: this detects an engine that lost its adapter in the meantime
all of them     an engine that does not answer, or answers wrongly, is ended: the next attempt gets a new one, with its checks
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial

from infra.cluster import connection
from infra.concurrency.background import in_background
from infra.engines import health_checks
from infra.engines.interface import (
    NO_SINK,
    WHOLE,
    EngineProgram,
    Release,
    RolloutMeasures,
    RolloutRequest,
    SampleRequest,
    SampleSink,
    Share,
    TurnRequest,
    Turns,
    check_sample,
)
from infra.engines.replicas.share import UntilDeadline
from infra.engines.rollout_collector import RolloutCollector
from infra.engines.scoring import ScoreRequest, Scores
from infra.engines.scoring import check as check_said
from infra.failures import EngineCrashedAgain, EngineOutOfMemory, EngineUnavailable, WrongAnswer
from infra.machine import devices, nvml
from infra.records import AdapterVersion, EngineRan
from infra.store.samples import Sample

log = logging.getLogger(__name__)

OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "Not enough memory", "Cannot allocate memory", "can't allocate memory")
MEMORY_DEADLINE_S = 300.0
_crashes: dict[str, tuple[str, str]] = {}
"""By an engine's identity: the request during which the latest one died, and its traceback without numbers."""
_ran_out: dict[str, float] = {}
"""By an engine's identity: the share of memory with which its latest start ran out of memory. Afterwards the memory was free."""


class CheckedEngine:
    """An Engine, made from an EngineProgram."""

    def __init__(self, program: EngineProgram, *, checks_beside: bool = True) -> None:
        """checks_beside: Score the base model while an adapter is read. False: after it, so that both can be timed."""
        self.program, self.checks_beside = program, checks_beside
        self.first_load: dict[str, float] = {}
        """Seconds of its first load of an adapter, and of its checks."""

    @property
    def identity(self) -> str:
        return self.program.identity

    @property
    def name(self) -> str:
        """Identifier of this server: replicas have one identity, and crashes and golden references of their own."""
        return f"{self.identity}-{self.program.replica}" if self.program.replica else self.identity

    @property
    def flags(self) -> tuple[str, ...]:
        return self.program.flags

    def ran(self) -> EngineRan:
        program = self.program
        with self._ended_where_it_fails("what it computes with"):
            backends = program.backends()
        return EngineRan(
            kind=program.config.kind, identity=program.identity, flags=program.flags, versions=program.versions, backends=backends
        )

    def wake(self) -> None:
        program = self.program
        try:
            with self._ended_where_it_fails("start"):
                if program.wake() and self._is_merged:
                    self._check_before_other_weights_come()
        except EngineOutOfMemory as error:
            if _ran_out.get(self.name) == program.config.memory_fraction:
                del _ran_out[self.name]  # if the same command is run again, the engine gets two tries again
                raise EngineCrashedAgain(
                    f"{error}\nthe engine ran out of memory twice, although the GPU's memory was free in between: lower engine.memory_fraction "
                    f"({program.config.memory_fraction}) or engine.max_running_requests, or take a smaller model"
                ) from error
            if wait_until_free(self._used_frac, 1 - program.config.memory_fraction, MEMORY_DEADLINE_S):
                _ran_out[self.name] = program.config.memory_fraction
            raise
        _ran_out.pop(self.name, None)

    def load_adapter(self, adapter: AdapterVersion) -> None:
        if self.program.is_verified(adapter):
            return
        with self._ended_where_it_fails(f"adapter {adapter.served_name or 'none'}"):
            marks = [time.monotonic()]
            before = self._scores_before(adapter)
            # The next try relies on the canary: an unconfirmed reference may itself be wrong.
            with self._unconfirmed_where_it_is_wrong() if adapter.canary is not None else nullcontext():
                self._load_and_check_base(adapter)
            marks.append(time.monotonic())
            with self._unconfirmed_where_it_is_wrong():
                self._check_adapter(adapter, probes_cache=True, before=before)
                if self._is_merged:  # new weights: their answers now are the reference for each later wake
                    self._check_base()
            self.program.mark_verified(adapter)
            load = {"adapter_s": marks[1] - marks[0], "checks_s": time.monotonic() - marks[1]}
            self.first_load = self.first_load or load
        if adapter.canary is not None:
            for weights in {self.name, self._weights}:
                health_checks.confirm(weights)

    def start_figures(self) -> dict[str, float]:
        figures = self.program.start_figures()
        return figures | self.first_load if figures else {}

    def _check_before_other_weights_come(self) -> None:
        """Run the golden check before the weights change, since it is impossible afterwards. Merged weights are no reference before their canary
        has passed."""
        if not self.program.served_adapters() or health_checks.is_known(self._weights):
            self._check_base()

    def _load_and_check_base(self, adapter: AdapterVersion) -> None:
        """Load the adapter and run the golden check. Merged weights were scored at the wake."""
        # Perf: the golden check, 0.08 s, runs while the adapter is read (7B, H200, docs/results/h200-hand-over.md).
        with in_background(self._check_base) if self.checks_beside and not self._is_merged else nullcontext():
            self.program.load_adapter(adapter)
        if not self.checks_beside and not self._is_merged:
            self._check_base()

    def generate(self, request: RolloutRequest, sink: SampleSink = NO_SINK) -> tuple[list[Sample], RolloutMeasures]:
        adapter, rollout = request.adapter, RolloutCollector(request, sink, self.program.vocab_size)
        self.check_served(adapter)
        keeps_prefixes = sink.partial is not None
        share = WHOLE if request.deadline.limit_s is None else UntilDeadline(request.deadline)
        sample = partial(self.program.sample, rollout.missing, request.sampling, adapter, rollout.take, share=share)
        return rollout.completed(
            partial(sample, keeps_prefixes=keeps_prefixes, load=sink.load),
            partial(self._ask_again, adapter),
            self._ended_where_it_fails_to_sample(len(rollout.missing)),
        )

    def sample_share(
        self,
        missing: Sequence[SampleRequest],
        request: RolloutRequest,
        take: Callable[[Sample], bool],
        share: Share,
        *,
        keeps_prefixes: bool,
    ) -> RolloutMeasures:
        """Sample a share of a rollout, as EngineProgram.sample does."""
        with self._ended_where_it_fails_to_sample(len(missing)):
            return self.program.sample(
                missing, request.sampling, request.adapter, take, keeps_prefixes=keeps_prefixes, share=share
            )

    def check_again(self, adapter: AdapterVersion) -> None:
        """Check the engine once more after a rollout of which it sampled a share. Raises as `generate` does."""
        with self._ended_where_it_fails_to_sample(0):
            self._ask_again(adapter)

    @asynccontextmanager
    async def turns(self, adapter: AdapterVersion) -> AsyncIterator[Turns]:
        self.check_served(adapter)
        with self._ended_where_it_fails("turns of episodes"), self._unconfirmed_where_it_is_wrong():
            async with self.program.turns(adapter) as turns:
                yield _CheckedTurns(turns, self.program.vocab_size)
            await asyncio.to_thread(self._ask_again, adapter)

    def release_memory(self) -> Release:
        if not self.program.is_running():
            self.program.stop()  # child processes of a dead engine may still run
            plan = devices.plan(self.program.config)
            return Release(plan=plan.colocation, reason="no engine is running: it holds nothing", released_bytes=0)
        with self._ended_where_it_fails("release of memory"):
            return self.program.release_memory()

    @property
    def kv_cache_tokens(self) -> int:
        return self.program.kv_cache_tokens

    def memory_in_use_gib(self) -> float:
        return self.program.memory_in_use_gib()

    def stop(self) -> None:
        self.program.stop()

    def check_served(self, adapter: AdapterVersion) -> None:
        """Raises WrongAnswer if it serves another adapter, EngineUnavailable if it is gone."""
        served, asked = self.program.served_adapters(), tuple(name for name in [adapter.served_name] if name)
        if served != asked:
            raise WrongAnswer(f"the engine serves {served or 'the base model'}, asked for {asked or 'the base model'}")

    @property
    def _is_merged(self) -> bool:
        return self.program.config.lora_mode == "merged"

    @property
    def _precision(self) -> str:
        """What decides the tolerances of the checks: `fp8`, or the engine's dtype."""
        return "fp8" if self.program.config.is_fp8 else self.program.dtype

    @property
    def _weights(self) -> str:
        """Key of the golden reference: model, flags and, if an adapter is merged into the weights, that adapter."""
        merged = self.program.served_adapters() if self._is_merged else ()
        return "-".join((self.name, *merged))

    def _check_base(self) -> None:
        program = self.program
        health_checks.check_base(self._ask, program.golden_tokens, self._weights, self._precision, program.launch)

    def _ask(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        answers = self.program.score(questions)
        for question, scores in zip(questions, answers, strict=True):
            check_said(question, scores)
        return answers

    def _ask_again(self, adapter: AdapterVersion) -> None:
        self._check_adapter(adapter)
        if adapter.canary is None:
            self._check_base()

    def _scores_before(self, adapter: AdapterVersion) -> list[float] | None:
        """Log-probs of the canary before the load. With merged weights they cannot be computed without the adapter afterwards; they are those of
        the weights served before."""
        is_served = self.program.served_adapters() == tuple(name for name in [adapter.served_name] if name)
        return None if not self._is_merged or is_served else health_checks.scores_without(self._ask, adapter)

    def _check_adapter(self, adapter: AdapterVersion, *, probes_cache: bool = False, before: list[float] | None = None) -> None:
        merged, dtype = self._is_merged, self._precision
        health_checks.check_adapter(self._ask, adapter, dtype, probes_cache=probes_cache, is_merged=merged, before=before)

    @contextmanager
    def _ended_where_it_fails(self, request: str) -> Iterator[None]:
        """End an engine that does not answer or answers wrongly. A hanging server would otherwise be adopted again and again.

        request: Description of the request, equal when the same request is repeated.
        """
        try:
            yield
            if _crashes.get(self.name, ("", ""))[0] == request:
                del _crashes[self.name]
        except WrongAnswer:
            self.program.stop()
            raise
        except EngineUnavailable as error:
            traceback = error.traceback or self.program.last_traceback()
            words = f"{error}\n{self.program.log_tail()}"
            self.program.stop()
            if any(sign in words for sign in OUT_OF_MEMORY) and not isinstance(error, EngineOutOfMemory):
                raise EngineOutOfMemory(words) from error
            if traceback and not isinstance(error, EngineOutOfMemory):
                raise self._crashed(str(error), request, traceback) from error
            raise

    @contextmanager
    def _ended_where_it_fails_to_sample(self, num_missing: int) -> Iterator[None]:
        with self._ended_where_it_fails(f"rollout of {num_missing} samples"), self._unconfirmed_where_it_is_wrong():
            yield

    def _crashed(self, message: str, request: str, traceback: str) -> EngineUnavailable:
        crash = (request, re.sub(r"0x[0-9a-f]+|[0-9]+", "", traceback))
        if _crashes.get(self.name) == crash:
            del _crashes[self.name]  # the same command, run again, may start two engines again
            return EngineCrashedAgain(f"two engines died of the same error ({request}): {message}", traceback)
        _crashes[self.name] = crash
        return EngineUnavailable(message, traceback)

    @contextmanager
    def _unconfirmed_where_it_is_wrong(self) -> Iterator[None]:
        """Discard an unconfirmed golden reference after a wrong answer. An engine that returns garbage from its first launch on passes the golden
        check, which only compares. Its log-probs must not become the reference."""
        weights = self.name  # not the weights that were just merged: they have not been a reference yet
        try:
            yield
        except WrongAnswer:
            health_checks.forget_unconfirmed(weights)
            raise

    def _used_frac(self) -> float:
        """Share of memory in use on the fullest of the engine's GPUs."""
        num_gpus = self.program.config.tensor_parallel
        parts, found = connection.place(self.program.replica, num_gpus).parts, [0.0]
        for node, number, _ in parts:
            wanted = node.call(devices.engine_gpus, num_gpus // len(parts), number)
            found += [gpu.used_bytes / gpu.total_bytes for gpu in node.call(nvml.read).gpus if gpu.number in wanted]
        return max(found)


class _CheckedTurns:
    """Turns, each of which is checked as a sample of a rollout is."""

    def __init__(self, turns: Turns, vocab_size: int) -> None:
        self._turns, self._vocab_size = turns, vocab_size
        self.adapter = turns.adapter

    @property
    def num_prompt_tokens(self) -> int:
        return self._turns.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self._turns.num_cached_tokens

    async def sample(self, request: TurnRequest) -> Sample:
        sample = await self._turns.sample(request)
        check_sample(sample, self.adapter, self._vocab_size)
        return sample


def wait_until_free(used_frac: Callable[[], float], limit: float, timeout_s: float) -> bool:
    """Wait until at most this share of the GPUs' memory is in use, and return whether it is. After the deadline, the next start decides."""
    deadline = time.monotonic() + timeout_s
    while (used := used_frac()) > limit:
        if time.monotonic() > deadline:
            log.warning(
                "after %g s %.0f%% of the GPU memory are still in use, the engine needs %.0f%%",
                timeout_s,
                100 * used,
                100 * (1 - limit),
            )
            return False
        log.info("waiting for GPU memory: %.0f%% are in use, the engine can start below %.0f%%", 100 * used, 100 * limit)
        time.sleep(min(5.0, timeout_s / 10))
    return True
