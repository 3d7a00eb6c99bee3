"""Check a row's list of chat messages, and bring it into the form that chat templates take."""

import json
from collections.abc import Mapping, Sequence

from infra.data.forms.row import Chat, Message, text_of
from infra.data.json_values import JSON

IMAGE_COLUMNS = ("image", "images")
TEXT_ONLY = "models are trained on text here: take such rows out of the data set"


def chat_of(value: JSON, column: str, tools: JSON = None) -> Chat:
    """Return the chat of a row.

    Raises:
        ValueError: for a list that is empty, a message without role or content, or one with an image; says which.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"the messages (column {column!r}) are {json.dumps(value)[:60]}: give a list with one message or more")
    messages = [_message(each, f"message {number} (column {column!r})") for number, each in enumerate(value)]
    if messages[-1]["role"] == "assistant" and not text_of(messages[-1]):
        raise ValueError(f"the last message (column {column!r}) is the assistant's and has no text to go on from: take it away")
    return Chat(messages, _tools(tools))


def without_last_turn(chat: Chat) -> tuple[Chat, str]:
    """Return the chat without the assistant's last message, and that message's text.

    Raises:
        ValueError: where nothing is left.
    """
    if len(chat.messages) < 2:
        raise ValueError("its only message is the assistant's: there is nothing to ask")
    return chat._replace(messages=chat.messages[:-1]), text_of(chat.messages[-1])


def with_instruction(chat: Chat, instruction: str) -> Chat:
    """Put the instruction behind the last message of the user."""
    last = max((n for n, message in enumerate(chat.messages) if message["role"] == "user"), default=None)
    if not instruction or last is None:
        return chat
    changed = chat.messages[last] | {"content": f"{text_of(chat.messages[last])} {instruction}".strip()}
    return chat._replace(messages=[*chat.messages[:last], changed, *chat.messages[last + 1 :]])


def check_no_images(row: Mapping[str, JSON]) -> None:
    """Raises ValueError for a row with images in a column of their own."""
    for column in IMAGE_COLUMNS:
        if (value := row.get(column)) and not isinstance(value, str):
            raise ValueError(f"column {column!r} holds images; {TEXT_ONLY}")


def _message(value: JSON, place: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ValueError(f"{place} is {json.dumps(value)[:60]}: give an object with role and content")
    if value.get("content") is None and not value.get("tool_calls"):
        raise ValueError(f"{place} has no content")
    # A Parquet file has every field in every message, with null where a message lacks it.
    fields = {name: part for name, part in value.items() if part is not None and name not in ("role", "content")}
    return {"role": value["role"], "content": _content(value.get("content"), place)} | fields


def _content(value: JSON, place: str) -> JSON:
    """Text as it stands; a list of text parts as one text."""
    if isinstance(value, list):
        return "".join(_part(part, place) for part in value)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place} has content {json.dumps(value)[:60]}: give text")
    return value


def _part(part: JSON, place: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"{place} holds a part of type {kind!r}; {TEXT_ONLY}")


def _tools(value: JSON) -> list[JSON] | None:
    """A list of schemas, or its JSON as text, as Parquet files often have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"its tools are text that is no JSON: {error.msg}") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"its tools are {json.dumps(value)[:60]}: give a list of JSON schemas")
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
