"""Tools of environments and agents: Python functions with a schema from their signature, each call in the journal before it is made.

    @tool
    def book(seat: int) -> str:
        "Book a seat."

`book(seat=3)` in an episode is made once. After a crash its recorded result is given back; without a result the episode ends as
"outcome unknown", unless the tool is declared with `@tool(idempotent=True)`. An error of a tool is a result: the text `error: ...`.
"""

import inspect
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, overload

from infra.environments.limits import StepTimeOut

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
ERROR = "error: "
"""Before the text of a tool's error."""
MAX_ERROR_CHARACTERS = 500
CALL_TIMEOUT_S = 60.0
"""Longest time in which the gateway writes a call to the journal."""
Message = dict[str, Any]


class OutcomeUnknown(BaseException):
    """An earlier attempt called the tool, and whether that had an effect is not known. No environment should catch it."""


class CallJournal:
    """The episode's calls, which the gateway keeps on record."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key
        self.counts: Counter[str] = Counter()

    def begin_episode(self) -> None:
        """Raises OutcomeUnknown if it may not begin again after a worker was lost."""
        self._sent("/episodes", {})

    def begin(self, name: str, arguments: dict[str, Any], is_idempotent: bool) -> Message:
        """Returns the record: whether it is done, with its result, and its key.

        Raises:
            OutcomeUnknown: if the call must not be made.
        """
        words = json.dumps([name, arguments], sort_keys=True)
        occurrence = self.counts[words]
        self.counts[words] += 1
        fields = {"name": name, "arguments": arguments, "occurrence": occurrence, "idempotent": is_idempotent}
        return self._sent("/tool_calls", fields)

    def finish(self, key: str, result: object, is_error: bool) -> None:
        self._sent("/tool_calls/results", {"key": key, "result": result, "is_error": is_error})

    def _sent(self, path: str, fields: Message) -> Message:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(self.base_url + path, json.dumps(fields).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
                found: Message = json.load(response)
        except urllib.error.HTTPError as error:
            content = json.load(error)["error"]
            if content["code"] == "outcome_unknown":
                raise OutcomeUnknown(content["message"]) from None
            raise ValueError(content["message"]) from None
        return found


JOURNAL: ContextVar[CallJournal | None] = ContextVar("journal", default=None)
"""Of the episode under way; None outside of episodes, where a tool is a plain function."""


class Tool:
    def __init__(self, function: Callable[..., Any], *, idempotent: bool = False) -> None:
        self.function, self.name, self.is_idempotent = function, function.__name__, idempotent
        self.__doc__ = function.__doc__
        self.signature = inspect.signature(function)

    @property
    def schema(self) -> Message:
        """As the field `tools` of OpenAI's requests wants it."""
        properties, required = {}, []
        for name, parameter in self.signature.parameters.items():
            if parameter.annotation not in TYPES:
                raise ValueError(
                    f"tool {self.name!r}: parameter {name!r} must be one of {', '.join(each.__name__ for each in TYPES)}"
                )
            properties[name] = {"type": TYPES[parameter.annotation]}
            required += [name] if parameter.default is parameter.empty else []
        parameters = {"type": "object", "properties": properties, "required": required}
        about = inspect.cleandoc(self.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Call it, once in an episode and all its attempts.

        Raises:
            OutcomeUnknown: if it must not be called again.
        """
        if (journal := JOURNAL.get()) is None:
            return self.function(*positional, **named)
        arguments = dict(self.signature.bind(*positional, **named).arguments)
        call = journal.begin(self.name, arguments, self.is_idempotent)
        if call["is_done"]:
            return call["result"]
        result, is_error = self._made(arguments)
        journal.finish(call["key"], result, is_error)
        return result

    def _made(self, arguments: dict[str, Any]) -> tuple[Any, bool]:
        try:
            result = self.function(**arguments)
            json.dumps(result)
        except StepTimeOut:
            raise
        except Exception as error:  # noqa: BLE001  # a user's tool: its error is its result
            return f"{ERROR}{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS], True
        return result, False


@overload
def tool(function: Callable[..., Any]) -> Tool: ...
@overload
def tool(function: None = None, *, idempotent: bool = False) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, *, idempotent: bool = False) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool.

    idempotent: Whether a second call has no second effect, so that it may be repeated after a crash.
    """
    return Tool(function, idempotent=idempotent) if function else lambda found: Tool(found, idempotent=idempotent)


def answers_of(tools: Sequence[Tool], message: Message) -> list[Message]:
    """Make the tool calls of a model's message; return a message with the result of each. A call that cannot be made has an error as its result."""
    known = {each.name: each for each in tools}
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": _answer(known, call["function"])}
        for call in message.get("tool_calls") or ()
    ]


def _answer(known: dict[str, Tool], call: Message) -> str:
    if call["name"] not in known:
        return f"{ERROR}no tool {call['name']!r}; there are {', '.join(known)}"
    wanted = known[call["name"]]
    try:
        arguments = json.loads(call["arguments"])
        wanted.signature.bind(**arguments)
    except (ValueError, TypeError) as error:
        return f"{ERROR}arguments of {call['name']!r}: {error}"
    result = wanted(**arguments)
    return result if isinstance(result, str) else json.dumps(result)
