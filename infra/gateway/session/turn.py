"""A turn of a session: the request for it, the turn under way, and its answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from infra.gateway.rendering.interface import Tools
from infra.gateway.rendering.messages import ChatMessage
from infra.gateway.session.records import TurnRecord, turn_id
from infra.gateway.session.tracks import Point


class Query(NamedTuple):
    """A request as the session understands it."""

    messages: list[ChatMessage]
    tools: str
    prompt: list[int]
    point: Point | None
    """The answer that it continues; None: everything was rendered."""
    max_new_tokens: int
    listed_tools: Tools
    digest: str = ""
    """Of the prompt's tokens."""


@dataclass
class Turn:
    """A turn under way or complete."""

    record: "asyncio.Future[TurnRecord]"
    max_new_tokens: int
    is_waited_for: Callable[[], bool] = lambda: False
    """Whether an agent still waits for it."""
    is_begun: bool = False
    """Whether it counts as a turn of this episode: one on record does from the first request for it."""
    is_delivered: bool = False
    is_registered: bool = False
    answer: ChatMessage | None = None

    @property
    def is_free(self) -> bool:
        return not self.is_delivered and not self.is_waited_for()


@dataclass
class TurnAnswer:
    """The answer to a request."""

    message: ChatMessage
    record: TurnRecord
    prompt: list[int]
    prompt_digest: str
    turn: Turn = field(repr=False)

    @property
    def turn_id(self) -> str:
        """See infra.gateway.session.records.turn_id."""
        return turn_id(self.prompt_digest, self.record.number)

    def delivered(self) -> None:
        """The agent has it. Before that, an equal request gets this answer again."""
        self.turn.is_delivered = True


def done(record: TurnRecord) -> "asyncio.Future[TurnRecord]":
    """Return the future of a turn on record, in the event loop that runs."""
    future: asyncio.Future[TurnRecord] = asyncio.get_running_loop().create_future()
    future.set_result(record)
    return future
