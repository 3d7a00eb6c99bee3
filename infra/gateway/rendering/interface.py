"""What the gateway asks of a renderer."""

from collections.abc import Sequence
from typing import Any, Protocol

from infra.gateway.rendering.messages import ChatMessage
from infra.gateway.rendering.token_text import TokenText

Tools = Sequence[dict[str, Any]]


class ConversationRenderer(Protocol):
    """Turns the messages of one family of models into token ids, and answers into messages."""

    family: str
    """Name for people."""
    text: TokenText

    def render(self, messages: Sequence[ChatMessage], tools: Tools) -> list[int]:
        """The whole conversation as the model's chat template has it, with the opening of the assistant's turn."""

    def bridge_to_next_turn(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        """Extend a conversation's tokens, which end with an answer, by new messages and the opening of the assistant's next turn.

        tokens: Stay as they are. An answer that was cut off gets the token that ends a turn.
        """

    def parse(self, tokens: Sequence[int], tools: Tools, call_ids: str) -> ChatMessage:
        """Read an answer. call_ids: Prefix of the ids of its tool calls."""
