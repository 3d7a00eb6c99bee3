"""A trajectory: segments of tokens, each sampled by an adapter or given to it.

    given    system, user, template         no log-probabilities, never in the loss
    sampled  an answer, or a part of one    log-probabilities, adapter, seed, finish reason
    given    tool result, next user turn
    sampled  ...

One prompt and one answer is the simplest form: two segments. An answer that an abort interrupted and another adapter continued is two
sampled segments of one turn. An episode whose history was edited has several trajectories, its branches.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import orjson

from infra.records import FinishReason

Kind = Literal["sampled", "given"]
StopReason = Literal["done", "max_turns", "context", "time_out", "failed"]
"""Why an episode ended: the environment or agent ended it, a limit on turns, no room in the context, a time limit, or its environment failed."""
MAX_LOGPROB = 1e-4
"""Nats by which the rounding of an engine's log-softmax may exceed zero."""


@dataclass(frozen=True)
class Segment:
    kind: Kind
    tokens: tuple[int, ...]
    turn: int = 0
    """Turn that a sampled segment belongs to, from 0; of a given one, the turn that it leads to."""
    logprobs: tuple[float, ...] = ()
    """Nats, one a token, of the policy that sampled; empty if given."""
    adapter_version: int | None = None
    """Adapter that sampled; None if given."""
    adapter_sha256: str = ""
    """Digest of its weights, `base` for the base model; empty if given."""
    sampling_seed: int | None = None
    """Seed of the request; None if given, or if the engine has no seeds."""
    finish_reason: FinishReason | None = None
    """None if given; `abort` if a later segment of the same turn continues it."""

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"{self.kind} segment of turn {self.turn}: {problem}")

    def _problem(self) -> str | None:
        if self.kind not in get_args(Kind):
            return f"kind is {self.kind!r}, must be one of {', '.join(get_args(Kind))}"
        if self.turn < 0:
            return "turns count from 0"
        if not self.tokens:
            return "it has no tokens"
        if min(self.tokens) < 0:
            return f"token {min(self.tokens)} is below 0"
        return self._problem_of_sampled() if self.is_sampled else self._problem_of_given()

    def _problem_of_sampled(self) -> str | None:
        if len(self.logprobs) != len(self.tokens):
            return f"{len(self.tokens)} tokens with {len(self.logprobs)} log-probabilities"
        impossible = [value for value in self.logprobs if not math.isfinite(value) or value > MAX_LOGPROB]
        if impossible:
            return f"log-probability {impossible[0]} is not finite or above 0"
        if self.adapter_version is None or not self.adapter_sha256:
            return "it names no adapter: adapter_version and adapter_sha256 are needed"
        if self.finish_reason not in get_args(FinishReason):
            return f"finish reason {self.finish_reason!r}, must be one of {', '.join(get_args(FinishReason))}"
        return None

    def _problem_of_given(self) -> str | None:
        of_sampled = (self.logprobs, self.adapter_version, self.adapter_sha256, self.sampling_seed, self.finish_reason)
        return (
            None if of_sampled == ((), None, "", None, None) else "only sampled segments have log-probabilities, adapter and seed"
        )

    @property
    def is_sampled(self) -> bool:
        return self.kind == "sampled"


@dataclass(frozen=True)
class Trajectory:
    """One branch of an episode."""

    episode: str
    """Key of the episode in its rollout, the same in all its branches."""
    segments: tuple[Segment, ...]
    branch: int = 0
    """Index in the episode, from 0, in order of appearance."""
    stop_reason: StopReason | None = None
    """None: not ended."""

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"trajectory {self.branch} of episode {self.episode!r}: {problem}")

    def _problem(self) -> str | None:
        if self.branch < 0:
            return "branches count from 0"
        if self.stop_reason is not None and self.stop_reason not in get_args(StopReason):
            return f"stop reason {self.stop_reason!r}, must be one of {', '.join(get_args(StopReason))}"
        if not self.segments or self.segments[0].is_sampled:
            return "it must begin with a given segment: nothing predicts its first token"
        for before, after in zip(self.segments, self.segments[1:], strict=False):
            step = after.turn - before.turn
            if before.is_sampled and after.is_sampled and (step != 0 or before.finish_reason != "abort"):
                return f"a sampled segment of turn {after.turn} follows one of turn {before.turn} that was not aborted"
            if step != (1 if before.is_sampled and not after.is_sampled else 0):
                return f"turn {after.turn} follows turn {before.turn}: a given segment after a sampled one begins the next turn"
        return None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens, in order."""
        return tuple(token for segment in self.segments for token in segment.tokens)

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """For each token, whether it was sampled."""
        return tuple(segment.is_sampled for segment in self.segments for _ in segment.tokens)

    @property
    def num_turns(self) -> int:
        """Number of turns in which something was sampled."""
        return len({segment.turn for segment in self.segments if segment.is_sampled})

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments if segment.is_sampled)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Trajectory":
        """Read what to_json wrote. Raises ValueError for what is no trajectory."""
        try:
            segments = tuple(segment_from_json(segment) for segment in content["segments"])
            return cls(**{**content, "segments": segments})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a trajectory: {error}") from error

    @property
    def sha256(self) -> str:
        """Digest of all content. Log-probabilities count as float32, as files hold them."""
        return digest_of(self.segments, self.episode, self.branch, self.stop_reason)


def segment_from_json(content: Mapping[str, Any]) -> Segment:
    """Read one segment of a trajectory's JSON form."""
    lists = {name: tuple(content.get(name, ())) for name in ("tokens", "logprobs")}
    return Segment(**{**content, **lists})


def digest_of(segments: Sequence[Segment], *about: object) -> str:
    """Digest segments and what else belongs to them."""
    digest = hashlib.sha256(orjson.dumps([*about, len(segments)]))
    for each in segments:
        head = [each.kind, each.turn, len(each.tokens), each.adapter_version, each.adapter_sha256]
        digest.update(orjson.dumps([*head, each.sampling_seed, each.finish_reason]))
        digest.update(np.asarray(each.tokens, np.int64).tobytes())
        digest.update(np.asarray(each.logprobs, np.float32).tobytes())
    return digest.hexdigest()
