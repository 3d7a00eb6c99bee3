"""Tool calls in the text of an answer: Hermes' form, which Qwen2.5 and Qwen3 write, and Llama 3's."""

import json
import re
from typing import Any

from infra.gateway.rendering.messages import ToolCall

HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def hermes_calls(text: str, call_ids: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split an answer into its text and its calls. A call that cannot be read leaves all of the answer text: nothing of it gets lost."""
    calls = [_call(f"{call_ids}{number}", found, "arguments") for number, found in enumerate(HERMES.findall(text))]
    if not calls or None in calls:
        return text, ()
    return HERMES.sub("", text).strip(), tuple(call for call in calls if call)


def llama_calls(text: str, call_ids: str) -> tuple[str, tuple[ToolCall, ...]]:
    """As hermes_calls: an answer that is one JSON object with a name and parameters is a call. One that has a name alone is an answer in JSON."""
    call = _call(f"{call_ids}0", text.removeprefix("<|python_tag|>"), "parameters", may_have_none=False)
    return ("", (call,)) if call else (text, ())


def _call(call_id: str, text: str, arguments: str, *, may_have_none: bool = True) -> ToolCall | None:
    try:
        found: Any = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # the escape of half a character is JSON, and in no text
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get(arguments, {} if may_have_none else None)
    return ToolCall(call_id, found["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None
