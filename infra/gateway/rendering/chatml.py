"""ChatML in the form of Qwen2.5 and Qwen3: `<|im_start|>role`, the message, `<|im_end|>`.

Tools are listed in the system's message; calls and results are in tags.
"""

import json
from collections.abc import Iterator, Sequence

from infra.gateway.rendering.interface import Tools
from infra.gateway.rendering.messages import ChatMessage, ToolCall
from infra.gateway.rendering.token_text import Piece, SpecialToken, TokenText
from infra.gateway.rendering.tool_calls import hermes_calls

START, END = SpecialToken("<|im_start|>"), SpecialToken("<|im_end|>")
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class ChatML:
    """Plain ChatML; with default_system, Qwen2.5."""

    def __init__(self, text: TokenText, default_system: str | None = None) -> None:
        """default_system: System message of conversations that begin without one; None: there is none."""
        self.text, self.default_system = text, default_system
        self.family = "ChatML" if default_system is None else "Qwen2.5"
        self.turn_end = text.id_of(END.text)
        text.id_of(START.text)

    def render(self, messages: Sequence[ChatMessage], tools: Tools) -> list[int]:
        return self.text.ids(
            [*self._system(messages, tools), *self._pieces(messages, self._last_query(messages)), *self._opening()]
        )

    def bridge_to_next_turn(self, tokens: list[int], messages: Sequence[ChatMessage]) -> list[int]:
        is_closed = tokens[-1] == self.turn_end
        closing: list[Piece] = ["\n"] if is_closed else [END, "\n"]
        return tokens + self.text.ids([*closing, *self._pieces(messages, -1, is_first=False), *self._opening()])

    def parse(self, tokens: Sequence[int], tools: Tools, call_ids: str) -> ChatMessage:
        reasoning, text = self._split(self.text.decode(list(tokens)))
        content, calls = hermes_calls(text, call_ids) if tools else (text, ())
        return ChatMessage("assistant", content, calls, reasoning)

    def _split(self, text: str) -> tuple[str | None, str]:
        """Reasoning and the rest of an assistant's text."""
        return None, text

    def _last_query(self, messages: Sequence[ChatMessage]) -> int:
        """Index of the message behind which reasoning is shown."""
        return -1

    def _system(self, messages: Sequence[ChatMessage], tools: Tools) -> list[Piece]:
        system = messages[0].content if messages[0].role == "system" else self.default_system
        if tools:
            listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = ("" if system is None else f"{system}\n\n") + TOOLS.format(tools=listed)
        return [] if system is None else [START, f"system\n{system}", END, "\n"]

    def _opening(self) -> list[Piece]:
        return [START, "assistant\n"]

    def _pieces(self, messages: Sequence[ChatMessage], last_query: int, *, is_first: bool = True) -> Iterator[Piece]:
        """is_first: The conversation begins with these messages: _system has the first, where it is the system's."""
        for number, message in enumerate(messages):
            before = messages[number - 1].role if number else None
            after = messages[number + 1].role if number + 1 < len(messages) else None
            match message.role:
                case "system" if is_first and not number:
                    continue
                case "tool":
                    result = f"\n<tool_response>\n{message.content}\n</tool_response>"
                    begin: list[Piece] = [] if before == "tool" else [START, "user"]
                    end: list[Piece] = [] if after == "tool" else [END, "\n"]
                    yield from [*begin, result, *end]
                case "assistant":
                    yield from _turn("assistant", self._assistant(message, number > last_query))
                case role:
                    yield from _turn(role, message.content)

    def _assistant(self, message: ChatMessage, shows_reasoning: bool) -> str:
        return self._with_calls(message.content, message)

    def _with_calls(self, content: str, message: ChatMessage) -> str:
        return "\n".join([*([content] if content or not message.tool_calls else []), *map(self._call, message.tool_calls)])

    def _call(self, call: ToolCall) -> str:
        return f'<tool_call>\n{{"name": "{call.name}", "arguments": {self._arguments(call)}}}\n</tool_call>'

    def _arguments(self, call: ToolCall) -> str:
        return json.dumps(call.parsed, ensure_ascii=False)


def _turn(role: str, content: str) -> list[Piece]:
    return [START, f"{role}\n{content}", END, "\n"]


class Qwen3(ChatML):
    """Qwen3: an assistant's text begins with its reasoning, which the chat template shows only behind the latest question of a user."""

    def __init__(self, text: TokenText) -> None:
        super().__init__(text)
        self.family = "Qwen3"

    def _split(self, text: str) -> tuple[str | None, str]:
        if "</think>" not in text:
            return None, text
        reasoning = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        return reasoning, text.split("</think>")[-1].lstrip("\n")

    def _last_query(self, messages: Sequence[ChatMessage]) -> int:
        for number in range(len(messages) - 1, -1, -1):
            content = messages[number].content
            is_result = content.startswith("<tool_response>") and content.endswith("</tool_response>")
            if messages[number].role == "user" and not is_result:
                return number
        return len(messages) - 1

    def _assistant(self, message: ChatMessage, shows_reasoning: bool) -> str:
        reasoning, content = (
            (message.reasoning, message.content) if message.reasoning is not None else self._split(message.content)
        )
        if not shows_reasoning or not reasoning:
            return self._with_calls(content, message)
        content = content.lstrip("\n")
        return f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n{self._with_calls(content, message)}"

    def _arguments(self, call: ToolCall) -> str:
        return call.parsed if isinstance(call.parsed, str) else json.dumps(call.parsed, ensure_ascii=False)
