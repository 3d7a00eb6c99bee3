"""The engine interface: what users of an engine call, and what a program must implement for checked.py to make an Engine of it.

Also here: what every sample must satisfy before anyone else sees it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from infra.concurrency.deadline import NO_DEADLINE, Deadline
from infra.config import ColocationPlan, EngineConfig, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.journal import Journal
from infra.engines.partial import Partial
from infra.engines.replicas.share import WHOLE, Share
from infra.engines.request_timing import Load
from infra.engines.scoring import MAX_LOGPROB_ROUNDING, ScoreRequest, Scores
from infra.failures import EngineRefused, EngineUnavailable, WrongAnswer
from infra.records import AdapterVersion, EngineRan
from infra.store.samples import Sample

__all__ = ["WHOLE", "EngineRefused", "EngineUnavailable", "Share", "WrongAnswer"]  # these and all that is defined here


class Release(BaseModel):
    """The result of a release of memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: ColocationPlan
    reason: str
    """Why this plan was chosen, for people."""
    released_bytes: int
    """Released bytes as reported by NVML; 0 if there was nothing to release."""


class RolloutMeasures(BaseModel):
    """Figures of a rollout. None of them affects the samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float = 0.0
    """Mean time from a prompt's first request to its first token, by the client's clock."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    """Time of the last token, in seconds since the epoch; 0 if no server sampled anything."""
    prefix_cache_hit_frac: float = 0.0
    """Share of the samples' prompt tokens that were in the prefix cache."""
    num_kept: int = 0
    """Number of samples that earlier attempts had finished."""
    num_new_output_tokens: int = 0
    """Output tokens of the samples that this attempt generated."""
    num_unused: int = 0
    """Number of finished samples that over-sampling drops: neither taken nor carried over."""
    num_lost_replicas: int = 0
    """Number of replicas that died or did not answer, while others went on."""
    num_moved_samples: int = 0
    """Number of samples that lost replicas had not finished, and others generated."""
    num_reissued_samples: int = 0
    """Number of samples that a slow replica had not finished in time, and an idle one generated."""


class SampleRequest(NamedTuple):
    """A sample to generate."""

    prompt: Prompt
    sample_index: int
    begun: Sample | None = None
    """Its prefix, sampled by an earlier rollout."""

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt.prompt_id, self.sample_index


class TurnRequest(NamedTuple):
    """One turn of an episode to sample. What comes before it is known only when the turn before is complete."""

    prompt_id: int
    sample_index: int
    """Index of the episode among those of its prompt."""
    tokens: list[int]
    """All tokens before the answer."""
    seed: int
    temperature: float
    max_new_tokens: int
    ignore_eos: bool = False
    """See sampling.ignore_eos."""


class Turns(Protocol):
    """Samples turns of many episodes concurrently, all by one adapter."""

    adapter: AdapterVersion

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all turns so far."""

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that were in the prefix cache."""

    async def sample(self, request: TurnRequest) -> Sample:
        """Return the answer as a sample: its prompt is all before it.

        Raises:
            EngineUnavailable, EngineRefused, WrongAnswer: as Engine.generate does. No later turn may be sampled then.
        """


@dataclass(frozen=True)
class RolloutRequest:
    """The samples of a rollout."""

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    adapter: AdapterVersion
    num_oversampled_prompts: int = 0
    """The rollout is complete when this many groups are missing, whichever they are."""
    deadline: Deadline = NO_DEADLINE
    """When it is over, the rollout is complete with the groups that are complete; requests under way are aborted."""


@dataclass(frozen=True)
class SampleSink:
    """Where a rollout's samples come from, if earlier attempts have some, and where they go."""

    journal: Journal | None = None
    """An open one: its samples are not generated again, and each new sample is written to it."""
    partial: Partial | None = None
    """Groups of an earlier rollout to continue, and the room for aborted ones; None: aborted samples are lost."""
    on_sample: Callable[[Sample], object] = lambda sample: None
    """Called with each checked sample as soon as it is available, with the recovered ones first."""
    on_complete: Callable[[list[Sample]], object] = lambda samples: None
    """Called with the result while the engine is checked once more. Its effects count only if generate returns."""
    load: Load | None = None
    """Collects the seconds of each request, and limits how many run at a time. None: requests are not timed."""


NO_SINK = SampleSink()
"""Samples are only returned."""


class Engine(Protocol):
    """The engine as seen by the rest of the product."""

    @property
    def identity(self) -> str:
        """Identifier of model, flags and versions: engines with one identity are interchangeable."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that it is started with besides the model; no port and no path."""

    def ran(self) -> EngineRan:
        """Return its versions and backends, as reported by the engine if it reports them. It must be awake.

        Raises:
            EngineUnavailable: if it does not answer.
        """

    def wake(self) -> None:
        """Launch, adopt or resume the engine. Costs next to nothing when it is awake. It may not get requests yet: see load_adapter.

        Raises:
            EngineUnavailable: if it cannot be started.
            WrongAnswer: if an adapter is merged into its weights, and their answers differ from those before.
        """

    def start_figures(self) -> dict[str, float]:
        """Return seconds by part and compiled files of the start that `wake` made, loaded adapter included; empty if it made none."""

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Serve this adapter and no other, and run golden check and canary. Version 0 is the base model. Costs next to nothing if the adapter is
        already served and was checked since the last wake. Each rollout ends with another check.

        Raises:
            WrongAnswer: if the base model's answers differ from those before, or the engine's log-probs with this adapter differ from
            the trainer's.
        """

    def generate(self, request: RolloutRequest, sink: SampleSink = NO_SINK) -> tuple[list[Sample], RolloutMeasures]:
        """Return group_size checked samples of each prompt, by prompt and sample index, from the loaded adapter."""

    def turns(self, adapter: AdapterVersion) -> AbstractAsyncContextManager[Turns]:
        """Sample turns of episodes from the loaded adapter. Each turn is checked; at the end the engine is checked once more, as after a
        rollout. An engine error raised inside the block ends the engine."""

    def release_memory(self) -> Release:
        """Release memory for the trainer, and wait until NVML reports it as free."""

    @property
    def kv_cache_tokens(self) -> int:
        """Return the size of the KV cache in tokens; 0 if no engine runs or its kind has no KV cache."""

    def memory_in_use_gib(self) -> float:
        """Return the memory in use on the GPUs as reported by NVML, in GiB; on a CPU that of the engine's processes."""

    def stop(self) -> None:
        """End the engine and everything that it started."""


class EngineProgram(Protocol):
    """What an implementation provides; checked.CheckedEngine makes an Engine of it. Every method raises EngineUnavailable if the program does
    not answer, except kv_cache_tokens, memory_in_use_gib, is_running, log_tail, last_traceback and stop."""

    config: EngineConfig
    replica: int
    """Number of the program among the replicas of its engine, from 0."""

    @property
    def identity(self) -> str:
        """Identifier; equal for equal model, flags and versions."""

    @property
    def versions(self) -> dict[str, str]:
        """Package versions of its interpreter; see infra.telemetry.program_versions."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that it is started with besides the model; no port and no path."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def golden_tokens(self) -> list[list[int]]:
        """Texts of the golden check."""

    @property
    def launch(self) -> int:
        """Number of the launch, different for each started program."""

    def backends(self) -> dict[str, str]:
        """Attention and LoRA backends and version, as reported by the running program. Values that it does not report are left out."""

    def wake(self) -> bool:
        """Launch, adopt or resume. Returns whether the checks are due."""

    def start_figures(self) -> dict[str, float]: ...

    def mark_verified(self, adapter: AdapterVersion) -> None:
        """Record that the checks passed with this adapter. They are not due again before the next launch, resume or load."""

    def is_verified(self, adapter: AdapterVersion) -> bool:
        """Whether it serves this adapter, verified since the last launch or resume."""

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Serve this adapter and no other. Another thread may send requests to the base model in the meantime."""

    def served_adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""

    def score(self, questions: Sequence[ScoreRequest]) -> list[Scores]:
        """Answer each request, in order; in one batch if the engine can."""

    def sample(
        self,
        missing: Sequence[SampleRequest],
        sampling: SamplingConfig,
        adapter: AdapterVersion,
        take: Callable[[Sample], bool],
        *,
        keeps_prefixes: bool = False,
        load: Load | None = None,
        share: Share = WHOLE,
    ) -> RolloutMeasures:
        """Generate these samples, each with its own seed, and pass each to `take` as soon as it is finished, in any order. `take` returns
        False when there are enough: the others may be aborted, and later samples are not used.

        keeps_prefixes: When there are enough, also pass on the prefixes of the others, with finish_reason `abort`.
        share: Which of them this program still has to make, where several share the rollout.

        Raises:
            WrongAnswer: for an answer that is not a sample. Errors of take are raised too.
        """

    def turns(self, adapter: AdapterVersion) -> AbstractAsyncContextManager[Turns]:
        """Sample turns of episodes; see Engine.turns. The turns need no check."""

    def release_memory(self) -> Release: ...

    @property
    def kv_cache_tokens(self) -> int:
        """As of the Engine."""

    def memory_in_use_gib(self) -> float:
        """As of the Engine."""

    def is_running(self) -> bool: ...

    def log_tail(self) -> str:
        """Return the end of its log; empty if there is none."""

    def last_traceback(self) -> str:
        """Return the traceback at the end of its log; empty if there is none."""

    def stop(self) -> None: ...


def check_samples(
    samples: Sequence[Sample], prompts: Sequence[Prompt], group_size: int, adapter: AdapterVersion, vocab_size: int
) -> None:
    """Raises WrongAnswer unless every prompt has its samples, each by this adapter, with valid tokens and log-probs."""
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
    return {"sample": asdict(sample) | {"routes": f"{len(sample.routes or b'')} bytes"}}


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
