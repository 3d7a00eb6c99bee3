"""Messages of a conversation in one form, read strictly from OpenAI's JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

Role = Literal["system", "user", "assistant", "tool"]
FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "annotations", "audio"}
"""Fields of a message that are known. The last three are sent back by clients as they came, empty."""


class BadRequest(ValueError):
    """An agent's request that cannot be served as it is; the message names the field and what would be right."""


class ToolCall(NamedTuple):
    call_id: str
    name: str
    arguments: str
    """JSON text."""

    @property
    def parsed(self) -> Any:  # JSON
        """The arguments as JSON, or as they are where they are none, or none that a text can hold."""
        try:
            found = json.loads(self.arguments)
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return self.arguments
        return found


@dataclass(frozen=True)
class ChatMessage:
    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """Of an assistant; None: not given."""

    def is_same(self, other: "ChatMessage") -> bool:
        """Whether `other`, which an agent sends, is this message on record. White space around an assistant's text does not count, ids of
        tool calls are in no template, and reasoning that is left out is not changed."""
        if self.role != other.role:
            return False
        if self.role != "assistant":
            return self.content == other.content
        calls = [[(call.name, call.parsed) for call in each.tool_calls] for each in (self, other)]
        is_same_reasoning = other.reasoning is None or other.reasoning.strip() == (self.reasoning or "").strip()
        return self.content.strip() == other.content.strip() and calls[0] == calls[1] and is_same_reasoning

    def to_json(self) -> dict[str, Any]:
        """The message as chat templates take it: arguments are objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.parsed}} for call in self.tool_calls
            ]
        return message | ({"reasoning_content": self.reasoning} if self.reasoning is not None else {})


def messages_from_json(content: object) -> list[ChatMessage]:
    """Raises BadRequest for what is no conversation that a model can answer."""
    if not isinstance(content, list) or not content:
        raise BadRequest(f"messages is {content!r:.60}, must be a list of one or more messages")
    messages = [_message(number, each) for number, each in enumerate(content)]
    if messages[-1].role == "assistant":
        raise BadRequest("the last message is the assistant's: continuing one is not supported, end with a user's or a tool's")
    return messages


def _message(number: int, content: object) -> ChatMessage:
    where = f"messages[{number}]"
    if not isinstance(content, Mapping):
        raise BadRequest(f"{where} is {content!r:.60}, must be an object")
    if unknown := sorted(set(content) - FIELDS):
        raise BadRequest(f"{where}.{unknown[0]} is not supported; known are {', '.join(sorted(FIELDS))}")
    if has := next((name for name in ("refusal", "audio", "annotations") if content.get(name)), None):
        raise BadRequest(f"{where}.{has} is not supported, it must be empty")
    role = "system" if content.get("role") == "developer" else content.get("role")
    if role not in get_args(Role):
        raise BadRequest(f"{where}.role is {role!r}, must be one of {', '.join(get_args(Role))}")
    calls, reasoning = content.get("tool_calls") or (), content.get("reasoning_content")
    if role != "assistant" and (calls or reasoning is not None):
        raise BadRequest(f"{where}: only an assistant's message has tool_calls and reasoning_content, this is the {role}'s")
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadRequest(f"{where}.reasoning_content must be text")
    text = _text(where, content.get("content"), may_be_empty=role == "assistant")
    return ChatMessage(cast(Role, role), text, _tool_calls(where, calls), reasoning)


def _text(where: str, content: object, *, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise BadRequest(f"{where}.content has a part of type {kind!r:.40}: only text is supported")
            if not isinstance(part.get("text"), str):
                raise BadRequest(f"{where}.content has a part whose text is {part.get('text')!r:.40}, must be text")
        return "".join(part["text"] for part in content)
    raise BadRequest(f"{where}.content is {content!r:.60}, must be text or a list of text parts")


def _tool_calls(where: str, calls: object) -> tuple[ToolCall, ...]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRequest(f"{where}.tool_calls must be a list")
    return tuple(_tool_call(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls))


def _tool_call(where: str, call: Any) -> ToolCall:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    except (KeyError, TypeError):
        raise BadRequest(f"{where} must have function.name and function.arguments") from None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(call.get("id", "")), str(name), text)


def tools_from_json(content: object) -> list[dict[str, Any]]:
    """Functions that the model may call, in OpenAI's form. Raises BadRequest for tools of another kind."""
    if content is None:
        return []
    if not isinstance(content, list):
        raise BadRequest("tools must be a list of functions")
    for number, tool in enumerate(content):
        is_function = isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("function"), Mapping)
        if not is_function or not isinstance(tool["function"].get("name"), str):
            raise BadRequest(
                f"tools[{number}] must be {{'type': 'function', 'function': {{'name': ...}}}}: only functions are supported"
            )
        if tool["function"].get("strict"):
            raise BadRequest(f"tools[{number}].function.strict must be false: a call's arguments are not constrained")
    return [dict(tool) for tool in content]
