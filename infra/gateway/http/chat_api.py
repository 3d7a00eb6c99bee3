"""`/v1/chat/completions`: the request, the answer and its chunks."""

from collections.abc import Iterator
from typing import Any

from infra.gateway.http.fields import Fields
from infra.gateway.rendering.messages import BadRequest, ChatMessage, messages_from_json, tools_from_json
from infra.gateway.rendering.token_text import TokenText
from infra.gateway.session.session import Session
from infra.gateway.session.turn import Query, TurnAnswer

Json = dict[str, Any]
REPLACEMENT = "\ufffd"
"""Stands in a text for bytes that are no character."""


def chat_query(session: Session, fields: Fields) -> Query:
    """Return the turn that a request asks for. Raises BadRequest for fields that cannot be served."""
    content = fields.content
    if content.get("logprobs") not in (None, True, False):
        raise BadRequest("logprobs must be true or false")
    tools = tools_from_json(content.get("tools"))
    return session.query(messages_from_json(content.get("messages")), tools if fields.offers_tools else [], fields.max_tokens)


def chat_answer(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Json:
    """Return the body of an answer, as OpenAI's API has it. created: seconds since 1970."""
    message: Json = {"role": "assistant", "content": answer.message.content or None, **_calls(answer.message)}
    if answer.message.reasoning is not None:
        message["reasoning_content"] = answer.message.reasoning
    logprobs = _logprobs(answer, text) if fields.content.get("logprobs") else None
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(answer), "logprobs": logprobs}
    return _envelope(answer, model, created, "chat.completion") | {"choices": [choice], "usage": usage(answer)}


def chat_chunks(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Iterator[Json]:
    """The complete turn in chunks: it is on record before the first one is sent."""
    whole = chat_answer(answer, fields, model, text, created)["choices"][0]
    message = whole["message"]
    calls = [{"index": number} | call for number, call in enumerate(message.pop("tool_calls", []))]
    deltas: list[Json] = [{"role": "assistant"}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    deltas += [{"tool_calls": [call]} for call in calls]
    head = _envelope(answer, model, created, "chat.completion.chunk")
    for number, delta in enumerate(deltas):
        logprobs = whole["logprobs"] if number == min(1, len(deltas) - 1) else None  # also of an answer without text
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]}
    yield head | {"choices": [{"index": 0, "delta": {}, "finish_reason": whole["finish_reason"], "logprobs": None}]}
    if fields.has_usage_chunk:
        yield head | {"choices": [], "usage": usage(answer)}


def finish_reason(answer: TurnAnswer) -> str:
    """Return `tool_calls` for an answer with calls, else `stop` or `length`."""
    return "tool_calls" if answer.message.tool_calls else answer.record.finish_reason


def usage(answer: TurnAnswer) -> Json:
    """Return the numbers of tokens: of the prompt, of the answer, of both."""
    num, num_new = len(answer.prompt), len(answer.record.output_tokens)
    return {"prompt_tokens": num, "completion_tokens": num_new, "total_tokens": num + num_new}


def _envelope(answer: TurnAnswer, model: str, created: int, kind: str) -> Json:
    return {"id": f"chatcmpl-{answer.turn_id}", "object": kind, "created": created, "model": model}


def _calls(message: ChatMessage) -> Json:
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"tool_calls": calls} if calls else {}


def _logprobs(answer: TurnAnswer, text: TokenText) -> Json:
    entries = []
    for token, logprob in zip(answer.record.output_tokens, answer.record.output_logprobs, strict=True):
        word = text.decode_all([token])
        # Of a token that is a part of a character, the bytes are not known.
        known = None if REPLACEMENT in word else list(word.encode())
        entries.append({"token": word, "logprob": logprob, "bytes": known, "top_logprobs": []})
    return {"content": entries, "refusal": None}
