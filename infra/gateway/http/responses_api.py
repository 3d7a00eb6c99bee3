"""`/v1/responses` as far as agents need it: text, functions, earlier responses by id."""

from collections.abc import Iterator, Mapping
from typing import Any

from infra.gateway.http.chat_api import Json
from infra.gateway.http.fields import Fields
from infra.gateway.rendering.messages import BadRequest, ChatMessage, messages_from_json, tools_from_json
from infra.gateway.rendering.token_text import TokenText
from infra.gateway.session.session import Session
from infra.gateway.session.turn import Query, TurnAnswer


def response_query(session: Session, fields: Fields) -> Query:
    """Return the turn that a request asks for. Raises BadRequest for fields that cannot be served."""
    content = fields.content
    before: list[ChatMessage] = []
    if (earlier := content.get("previous_response_id")) is not None:
        before = session.messages_after(str(earlier).removeprefix("resp_"))
        if not before:
            raise BadRequest(f"previous_response_id {earlier!r:.60} is no response of this session")
    if instructions := content.get("instructions"):
        if not isinstance(instructions, str):
            raise BadRequest(f"instructions is {instructions!r:.60}, must be text")
        before = [ChatMessage("system", instructions), *(before[1:] if before and before[0].role == "system" else before)]
    messages = [*before, *messages_from_json(_messages(content.get("input")))]
    listed = content.get("tools")
    tools = tools_from_json([_tool(number, tool) for number, tool in enumerate(listed)] if isinstance(listed, list) else listed)
    return session.query(messages, tools if fields.offers_tools else [], fields.max_tokens)


def _messages(items: object) -> list[Json]:
    """Input items as messages: what an assistant thought, said and called is one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise BadRequest("input must be text or a list of items")
    messages: list[Json] = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise BadRequest(f"input[{number}] must be an object")
        match item.get("type", "message"):
            case "message" if item.get("role") != "assistant":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "message":
                _of_assistant(messages, "content")["content"] = item.get("content")
            case "reasoning":
                # None where its content is left out, which is no change of it.
                _of_assistant(messages, "reasoning_content")["reasoning_content"] = _reasoning(number, item) or None
            case "function_call":
                call = {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
                _of_assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
            case kind:
                raise BadRequest(
                    f"input[{number}].type is {kind!r}: message, reasoning, function_call and function_call_output are known"
                )
    return messages


def _of_assistant(messages: list[Json], without: str = "") -> Json:
    """The assistant's message at the end, or a new one where there is none or it has this field."""
    if (
        not messages
        or messages[-1]["role"] != "assistant"
        or without in messages[-1]
        or (without and "tool_calls" in messages[-1])
    ):
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning(number: int, item: Mapping[str, Any]) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise BadRequest(f"input[{number}].content is {parts!r:.60}, must be a list of text parts")
    return "".join(part["text"] for part in parts)


def _tool(number: int, tool: object) -> object:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    if tool.get("strict"):
        raise BadRequest(f"tools[{number}].strict must be false: a call's arguments are not constrained")
    return {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters") if name in tool}}


def response_answer(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Json:
    """Return the body of an answer, as OpenAI's API has it. created: seconds since 1970."""
    is_cut = answer.record.finish_reason == "length"
    num, num_new = len(answer.prompt), len(answer.record.output_tokens)
    return {
        "id": f"resp_{answer.turn_id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": fields.content.get("instructions"),
        "output": _items(answer),
        "parallel_tool_calls": True,
        "tool_choice": fields.content.get("tool_choice") or "auto",
        "tools": fields.content.get("tools") or [],
        "usage": {
            "input_tokens": num,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num + num_new,
        },
    }


def _items(answer: TurnAnswer) -> list[Json]:
    message, name, items = answer.message, answer.turn_id, list[Json]()
    if message.reasoning is not None:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thought]})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": []}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [part]})
    for call in message.tool_calls:
        told = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append({"type": "function_call", "id": f"fc_{call.call_id}", **told})
    return items


def response_chunks(answer: TurnAnswer, fields: Fields, model: str, text: TokenText, created: int) -> Iterator[Json]:
    """Events of a complete response."""
    whole = response_answer(answer, fields, model, text, created)
    events: list[Json] = [{"type": "response.created", "response": whole | {"status": "in_progress", "output": []}}]
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index}
        events.append({"type": "response.output_item.added", **at, "item": item | ({"content": []} if "content" in item else {})})
        events += [event | at | {"item_id": item["id"]} for event in _events_of(item)]
        events.append({"type": "response.output_item.done", **at, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _events_of(item: Json) -> list[Json]:
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        return [{"type": f"{kind}.delta", "delta": item["arguments"]}, {"type": f"{kind}.done", "arguments": item["arguments"]}]
    if item["type"] != "message":
        return []
    (part,) = item["content"]
    at = {"content_index": 0}
    return [
        {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
    ]
