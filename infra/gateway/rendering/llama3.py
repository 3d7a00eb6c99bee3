"""Llama 3, 3.1 and 3.2: `<|start_header_id|>role<|end_header_id|>`, the message, `<|eot_id|>`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from infra.gateway.rendering.interface import Tools
from infra.gateway.rendering.messages import BadRequest, ChatMessage
from infra.gateway.rendering.token_text import Piece, SpecialToken, TokenText
from infra.gateway.rendering.tool_calls import llama_calls

BEGIN, END = SpecialToken("<|begin_of_text|>"), SpecialToken("<|eot_id|>")
CALL_END = SpecialToken("<|eom_id|>")
"""What a model may write in the place of END behind a call of a tool. Llama 3 has none."""
HEADER, HEADER_END = SpecialToken("<|start_header_id|>"), SpecialToken("<|end_header_id|>")
TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given "
    'prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables.\n\n'
)


class Llama3:
    """Without a date, Llama 3, which knows no tools; with one, Llama 3.1 and 3.2."""

    def __init__(self, text: TokenText, date: str | None = None) -> None:
        """date: Of the system's message, such as `26 Jul 2024`."""
        self.text, self.date = text, date
        self.family = "Llama 3" if date is None else "Llama 3.1"
        self.turn_end = text.id_of(END.text)
        self.ends = {self.turn_end, *text.ids_of(CALL_END.text)}
        for token in (BEGIN, HEADER, HEADER_END):
            text.id_of(token.text)

    def render(self, messages: Sequence[ChatMessage], tools: Tools) -> list[int]:
        if tools and self.date is None:
            raise BadRequest("tools is not supported: the chat template of Llama 3 has no place for them")
        if self.date is None:
            return self.text.ids([BEGIN, *self._pieces(messages), *self._opening()])
        has_system = messages[0].role == "system"
        rest = messages[1:] if has_system else messages
        system = "Environment: ipython\n" if tools else ""
        system += f"Cutting Knowledge Date: December 2023\nToday Date: {self.date}\n\n{messages[0].content.strip() if has_system else ''}"
        first: list[Piece] = []
        if tools:
            if not rest or rest[0].role != "user":
                raise BadRequest("tools of Llama 3.1 are listed in the first user's message, which must come first")
            listed = "".join(json.dumps(tool, ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
            first, rest = self._turn("user", TOOLS + listed + rest[0].content.strip()), rest[1:]
        return self.text.ids([BEGIN, *self._turn("system", system), *first, *self._pieces(rest), *self._opening()])

    def bridge_to_next_turn(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        closing: list[Piece] = [] if tokens[-1] in self.ends else [END]
        return tokens + self.text.ids([*closing, *self._pieces(messages), *self._opening()])

    def parse(self, tokens: Sequence[int], tools: Tools, call_ids: str) -> ChatMessage:
        text = self.text.decode(list(tokens))
        content, calls = llama_calls(text, call_ids) if tools else (text, ())
        return ChatMessage("assistant", content, calls)

    def _opening(self) -> list[Piece]:
        return [HEADER, "assistant", HEADER_END, "\n\n"]

    def _turn(self, role: str, content: str) -> list[Piece]:
        return [HEADER, role, HEADER_END, f"\n\n{content}", END]

    def _pieces(self, messages: Sequence[ChatMessage]) -> Iterator[Piece]:
        for message in messages:
            if self.date is None and (message.role == "tool" or message.tool_calls):
                raise BadRequest(
                    "tool calls and their results are not supported: the chat template of Llama 3 has no place for them"
                )
            if message.role == "tool":
                yield from self._turn("ipython", json.dumps(message.content, ensure_ascii=False))
            elif message.tool_calls:
                yield from self._turn("assistant", _call(message))
            else:
                yield from self._turn(message.role, message.content.strip())


def _call(message: ChatMessage) -> str:
    if len(message.tool_calls) != 1:
        raise BadRequest(f"a message has {len(message.tool_calls)} tool calls: the chat template of Llama 3 has place for one")
    call: Any = message.tool_calls[0]
    return f'{{"name": "{call.name}", "parameters": {json.dumps(call.parsed, ensure_ascii=False)}}}'
