"""The engine interface: what users of an engine call, and what a program must offer so that checked.py can make an Engine of it.

Also here: what every sample must satisfy before anyone else sees it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from infra.config import ColocationPlan, EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.journal import Journal
from infra.engines.partial import Partial
from infra.engines.request_timing import Load
from infra.engines.scoring import MAX_LOGPROB_ROUNDING, ScoreRequest, Scores
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion, EngineRan
from infra.store.samples import Sample

__all__ = ["EngineRefused", "EngineUnavailable", "WrongAnswer"]  # these and all that is defined here


class Release(BaseModel):
    """What a release of memory came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: ColocationPlan
    reason: str
    """Why this plan, for people."""
    released_bytes: int
    """As reported by NVML; 0 where there was nothing to release."""


class RolloutMeasures(BaseModel):
    """How a rollout went; none of it decides what was sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float = 0.0
    """Mean time from a prompt's first request to its first token, by the client's clock."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    """Seconds since the epoch; 0 where no server sampled anything."""
    prefix_cache_hit_frac: float = 0.0
    """Prompt tokens that were in the prefix cache, of all prompt tokens of the samples."""
    num_kept: int = 0
    """Samples that earlier attempts had finished."""
    num_new_output_tokens: int = 0
    """Of the samples that this attempt generated."""


class SampleRequest(NamedTuple):
    """A sample to generate."""

    prompt: Prompt
    sample_index: int
    begun: Sample | None = None
    """Its first tokens, which an earlier rollout has sampled."""

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt.prompt_id, self.sample_index


@dataclass(frozen=True)
class RolloutRequest:
    """What a rollout samples."""

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    adapter: AdapterVersion
    num_oversampled_prompts: int = 0
    """The rollout is complete when this many groups are missing, whichever they are."""


@dataclass(frozen=True)
class SampleSink:
    """Where a rollout's samples come from, if earlier attempts have some, and where they go."""

    journal: Journal | None = None
    """An open one: its samples are not generated again, and each new sample is written to it."""
    partial: Partial | None = None
    """Groups of an earlier rollout to continue, and the room for aborted ones; None: aborted samples are lost."""
    on_sample: Callable[[Sample], object] = lambda sample: None
    """Called with each checked sample as soon as it is there, with the recovered ones first."""
    on_complete: Callable[[list[Sample]], object] = lambda samples: None
    """Called with the result while the engine is checked once more; its effects count only if generate returns."""
    load: Load | None = None
    """Takes the seconds of each request, and says how many are under way at a time; None: requests are not timed."""


NO_SINK = SampleSink()
"""Samples are only returned."""


class Engine(Protocol):
    """What the rest of the product sees."""

    @property
    def identity(self) -> str:
        """Identifier of model, flags and versions: engines with one identity are interchangeable."""

    @property
    def flags(self) -> tuple[str, ...]:
        """What it is started with besides the model; no port and no path."""

    def ran(self) -> EngineRan:
        """What it is and computes with, by its own word where it says so; it must be awake.

        Raises:
            EngineUnavailable: if it does not answer.
        """

    def wake(self) -> None:
        """Launch, adopt or resume the engine. Costs next to nothing when it is awake. It is not asked anything yet: see load_adapter.

        Raises:
            EngineUnavailable: if it cannot be started.
            WrongAnswer: if it has an adapter in its weights, and does not answer as they did before.
        """

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Serve this adapter and no other; golden check and canary. Version 0 is the base model. Costs next to nothing when it is served
        already and was checked since the last wake; the end of each rollout asks again.

        Raises:
            WrongAnswer: if the base model does not answer as it did before, or the engine's log-probabilities with this adapter are
                not the trainer's.
        """

    def generate(self, request: RolloutRequest, sink: SampleSink = NO_SINK) -> tuple[list[Sample], RolloutMeasures]:
        """Return group_size checked samples of each prompt, by prompt and sample index, from the adapter that was loaded."""

    def release_memory(self) -> Release:
        """Make room for the trainer, and wait until NVML reports that the room is there."""

    @property
    def kv_cache_tokens(self) -> int:
        """Room in the KV cache, in tokens; 0 where no engine runs or its kind has none."""

    def memory_in_use_gib(self) -> float:
        """Return the GPU memory in use as reported by NVML, in GiB; on a CPU the resident memory of the engine's processes."""

    def stop(self) -> None:
        """End the engine and everything that it started."""


class EngineProgram(Protocol):
    """What an implementation offers; checked.CheckedEngine makes an Engine of it. Every method raises EngineUnavailable where the
    program does not answer, but kv_cache_tokens, memory_in_use_gib, is_running, log_tail, last_traceback and stop."""

    config: EngineConfig

    @property
    def identity(self) -> str:
        """Equal for equal model, flags and versions."""

    @property
    def versions(self) -> dict[str, str]:
        """What its interpreter has; see infra.telemetry.program_versions."""

    @property
    def flags(self) -> tuple[str, ...]:
        """What it is started with besides the model; no port and no path."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def golden_tokens(self) -> list[list[int]]:
        """Texts of the golden check."""

    @property
    def launch(self) -> int:
        """Another number for each program that was started, asleep or awake."""

    def backends(self) -> dict[str, str]:
        """What the living program computes attention and LoRA with, and its version, by its own word; what it does not say is left out."""

    def wake(self) -> bool:
        """Launch, adopt or resume; says whether the checks are due."""

    def mark_verified(self, adapter: AdapterVersion) -> None:
        """The checks were passed with this adapter: they are not due again before the next launch, resume or load."""

    def is_verified(self, adapter: AdapterVersion) -> bool:
        """Whether it serves this adapter, verified since it was last launched or resumed."""

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Serve this adapter and no other. Another thread may send requests to the base model meanwhile."""

    def served_adapters(self) -> tuple[str, ...]:
        """Names that are loaded."""

    def score(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        """An answer to each, in their order; in one batch if it can."""

    def sample(
        self,
        missing: Sequence[SampleRequest],
        sampling: SamplingConfig,
        adapter: AdapterVersion,
        take: Callable[[Sample], bool],
        *,
        keeps_prefixes: bool = False,
        load: Load | None = None,
    ) -> RolloutMeasures:
        """Generate these samples, each with its own seed, and pass each to `take` as soon as it is finished, in any order. When take returns
        False there are enough: the others may be aborted, and later samples are not used.

        keeps_prefixes: When there are enough, also pass the prefixes of the others, with finish_reason `abort`.

        Raises:
            WrongAnswer: for an answer that is no sample; errors of take are raised too.
        """

    def release_memory(self) -> Release: ...

    @property
    def kv_cache_tokens(self) -> int:
        """As of the Engine."""

    def memory_in_use_gib(self) -> float:
        """As of the Engine."""

    def is_running(self) -> bool: ...

    def log_tail(self) -> str:
        """The end of its log; empty where there is none."""

    def last_traceback(self) -> str:
        """Of its log, where it ended with one; else empty."""

    def stop(self) -> None: ...


def check_samples(
    samples: Sequence[Sample], prompts: Sequence[Prompt], group_size: int, adapter: AdapterVersion, vocab_size: int
) -> None:
    """Raises WrongAnswer unless every prompt has its samples, each by this adapter, with tokens and log-probabilities that can be."""
    expected = [(prompt.prompt_id, index) for prompt in prompts for index in range(group_size)]
    found = [(sample.prompt_id, sample.sample_index) for sample in samples]
    if found != expected:
        raise WrongAnswer(
            f"engine returned {len(samples)} samples, {len(expected)} were asked for ({len(prompts)} prompts x {group_size})",
            {"asked": expected, "returned": found},
        )
    for sample in samples:
        check_sample(sample, adapter, vocab_size)


def check_sample(sample: Sample, adapter: AdapterVersion, vocab_size: int) -> None:
    if problem := _problem(sample, adapter, vocab_size):
        raise WrongAnswer(f"sample {sample.sample_index} of prompt {sample.prompt_id}: {problem}", bad_answer_of(sample))


def bad_answer_of(sample: Sample) -> dict[str, Any]:
    return {"sample": asdict(sample)}


def _problem(sample: Sample, adapter: AdapterVersion, vocab_size: int) -> str | None:
    if (sample.adapter_version, sample.adapter_sha256) != (adapter.version, adapter.sha256):
        return f"sampled by adapter {sample.adapter_version} ({sample.adapter_sha256}), asked for {adapter.version} ({adapter.sha256})"
    if not 0 <= sample.num_older_tokens <= len(sample.output_tokens):
        return f"{sample.num_older_tokens} of its {len(sample.output_tokens)} tokens are older"
    if not sample.output_tokens:
        return f"no output tokens (finish reason {sample.finish_reason!r})"
    if len(sample.output_tokens) != len(sample.output_logprobs):
        return f"{len(sample.output_tokens)} tokens with {len(sample.output_logprobs)} log-probabilities"
    outside = [token for token in sample.output_tokens if not 0 <= token < vocab_size]
    if outside:
        return f"token {outside[0]} is outside the vocabulary of {vocab_size}"
    impossible = [value for value in sample.output_logprobs if not math.isfinite(value) or value > MAX_LOGPROB_ROUNDING]
    if impossible:
        return f"log-probability {impossible[0]} cannot be"
    if sample.finish_reason not in ("stop", "length"):
        return f"finish reason {sample.finish_reason!r}"
    return None
