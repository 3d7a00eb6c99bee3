"""Tracks: the sequences of tokens that an episode has on record, each with the messages that it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infra.gateway.rendering.messages import ChatMessage
from infra.gateway.session.records import TurnRecord, tokens_digest, turn_id
from infra.trajectories.segments import Segment

WITHOUT_MESSAGES = "completions"
"""In the place of tools: a track of prompts without messages. Its messages are the texts between answers, and the answers."""


class AnswerEnd(NamedTuple):
    """The end of an answer in a track."""

    num_messages: int
    num_tokens: int
    record: TurnRecord


@dataclass
class Track:
    """One sequence, which becomes one trajectory."""

    tools: str
    """The tools as they were listed: another list is another conversation."""
    first_turn: int = 0
    """Number of its first turn; above 0 where each turn of the episode has a track of its own."""
    messages: list[ChatMessage] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    ends: list[AnswerEnd] = field(default_factory=list)

    def add_turn(
        self, messages: Sequence[ChatMessage], answer: ChatMessage, prompt: Sequence[int], record: TurnRecord
    ) -> AnswerEnd:
        """Append what was given and the answer. Tokens on record stay as they are.

        messages, prompt: Of the whole conversation.
        """
        turn = self.first_turn + len(self.ends)
        self.segments += [Segment("given", tuple(prompt[len(self.tokens) :]), turn), sampled_segment(record, turn)]
        self.messages = [*self.messages, *messages[len(self.messages) :], answer]
        self.tokens = [*prompt, *record.output_tokens]
        self.ends.append(AnswerEnd(len(self.messages), len(self.tokens), record))
        return self.ends[-1]

    def turn_id(self, end: AnswerEnd) -> str:
        """Return the id of one of its turns."""
        return turn_id(tokens_digest(self.tokens[: end.num_tokens - len(end.record.output_tokens)]), end.record.number)


class Point(NamedTuple):
    """An answer that a request continues."""

    track: Track
    end: AnswerEnd

    @property
    def is_last(self) -> bool:
        return self.track.ends[-1] is self.end


def sampled_segment(record: TurnRecord, turn: int) -> Segment:
    """Return the segment of a turn's sampled tokens. turn: its number in the episode."""
    return Segment(
        "sampled",
        tuple(record.output_tokens),
        turn,
        logprobs=tuple(record.output_logprobs),
        adapter_version=record.adapter_version,
        adapter_sha256=record.adapter_sha256,
        sampling_seed=record.seed,
        finish_reason=record.finish_reason,
    )


def point_of(tracks: Sequence[Track], messages: Sequence[ChatMessage], tools: str) -> Point | None:
    """The latest answer on record up to which these messages are unchanged; None if there is none."""
    found: list[tuple[int, bool, int, Point]] = []
    for index, track in enumerate(tracks):
        if track.tools != tools:
            continue
        common = num_common(track.messages, messages)
        ends = [end for end in track.ends if end.num_messages <= common and end.num_messages < len(messages)]
        if ends:
            point = Point(track, ends[-1])
            found.append((ends[-1].num_messages, point.is_last, index, point))
    return max(found, key=lambda each: each[:3])[3] if found else None


def num_common(recorded: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> int:
    """Number of messages at the beginning that were not changed."""
    pairs = zip(recorded, messages, strict=False)
    return next(
        (number for number, (mine, theirs) in enumerate(pairs) if not mine.is_same(theirs)), min(len(recorded), len(messages))
    )


def text_point_of(tracks: Sequence[Track], text: str) -> tuple[Point, str] | None:
    """The latest answer that ends a beginning of this text, and the rest of the text."""
    found: list[tuple[int, Point]] = []
    for track in (each for each in tracks if each.tools == WITHOUT_MESSAGES):
        for end in track.ends:
            before = "".join(message.content for message in track.messages[: end.num_messages])
            if text.startswith(before) and len(before) < len(text):
                found.append((len(before), Point(track, end)))
    return next(((point, text[num:]) for num, point in sorted(found, key=lambda each: -each[0])), None)


def tokens_point_of(tracks: Sequence[Track], tokens: Sequence[int]) -> Point | None:
    """The latest answer that ends a beginning of these tokens."""
    points = [Point(track, end) for track in tracks if track.tools == WITHOUT_MESSAGES for end in track.ends]
    fitting = [
        point
        for point in points
        if point.end.num_tokens < len(tokens)
        and list(tokens[: point.end.num_tokens]) == point.track.tokens[: point.end.num_tokens]
    ]
    return max(fitting, key=lambda point: point.end.num_tokens, default=None)
