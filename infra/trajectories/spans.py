"""The segments of a sample as a file holds them: without their tokens, which lie one after the other in the sample's own columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.records import FinishReason
from infra.trajectories.segments import Kind, Segment, Trajectory


@dataclass(frozen=True)
class SegmentSpan:
    """A segment without its tokens; the fields are those of Segment."""

    kind: Kind
    num_tokens: int
    turn: int = 0
    adapter_version: int | None = None
    adapter_sha256: str = ""
    sampling_seed: int | None = None
    finish_reason: FinishReason | None = None

    @property
    def is_sampled(self) -> bool:
        return self.kind == "sampled"


def span_of(segment: Segment) -> SegmentSpan:
    """Return the span of a segment: the same without its tokens."""
    about = (segment.turn, segment.adapter_version, segment.adapter_sha256, segment.sampling_seed, segment.finish_reason)
    return SegmentSpan(segment.kind, len(segment.tokens), *about)


def sampled_mask(spans: Sequence[SegmentSpan]) -> NDArray[np.bool_]:
    """For each token, whether it was sampled."""
    return np.repeat([span.is_sampled for span in spans], [span.num_tokens for span in spans])


def turn_of_each(spans: Sequence[SegmentSpan]) -> NDArray[np.int64]:
    """For each token, its turn as a position among the turns in which something was sampled."""
    place = {turn: number for number, turn in enumerate(turns_of(spans))}
    last = max(place.values(), default=0)
    return np.repeat([place.get(span.turn, last) for span in spans], [span.num_tokens for span in spans])


def turns_of(spans: Sequence[SegmentSpan]) -> list[int]:
    """Turns in which something was sampled, in order."""
    return sorted({span.turn for span in spans if span.is_sampled})


def pieces_of(trajectory: Trajectory) -> tuple[list[int], list[int], list[float], tuple[SegmentSpan, ...]]:
    """Return a trajectory's first prompt, all tokens after it, their log-probabilities (0 where given), and its spans."""
    first, *rest = trajectory.segments
    while rest and not rest[0].is_sampled:  # a prompt in several pieces is one prompt
        first = Segment("given", first.tokens + rest.pop(0).tokens, first.turn)
    tokens = [token for segment in rest for token in segment.tokens]
    logprobs = [value for segment in rest for value in (segment.logprobs or (0.0,) * len(segment.tokens))]
    return list(first.tokens), tokens, logprobs, tuple(span_of(segment) for segment in (first, *rest))


def segments_of(
    spans: Sequence[SegmentSpan], tokens: Sequence[int], logprobs: Sequence[float] | NDArray[np.float32]
) -> tuple[Segment, ...]:
    """Return the segments of these spans.

    tokens: All of them, the prompt's first. logprobs: of the tokens after the prompt.

    Raises:
        ValueError: if the spans do not cover the tokens.
    """
    ends = np.cumsum([0, *(span.num_tokens for span in spans)]).tolist()
    if not spans or ends[-1] != len(tokens):
        raise ValueError(f"segments of {ends[-1]} tokens do not fit {len(tokens)} tokens")
    first, segments = spans[0].num_tokens, []
    for span, begin, end in zip(spans, ends, ends[1:], strict=False):
        values = tuple(map(float, logprobs[begin - first : end - first])) if span.is_sampled else ()
        about = (span.adapter_version, span.adapter_sha256, span.sampling_seed, span.finish_reason)
        segments.append(Segment(span.kind, tuple(map(int, tokens[begin:end])), span.turn, values, *about))
    return tuple(segments)
