"""Tools of environments and agents: Python functions with a schema from their signature, each call in the journal before it is made.

    @tool
    def book(seat: int) -> str:
        "Book a seat."

`book(seat=3)` in an episode is made once. After a crash its recorded result is given back; without a result the episode ends as
"outcome unknown", unless the tool is declared with `@tool(idempotent=True)`. An error of a tool is a result: the text `error: ...`. So is a call that
takes too long, a result that is no JSON or too long, and a call that the model wrote wrongly.
"""

import inspect
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, get_type_hints, overload

from infra.environments.limits import StepTimeOut, ToolTimeOut, call_within

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
ERROR = "error: "
"""Before the text of a tool's error."""
MAX_ERROR_CHARACTERS = 500
CALL_TIMEOUT_S = 60.0
"""Longest time in which the gateway writes a call to the journal."""
CUT = " [...] "
"""Stands for what is left out of a result that is too long."""
Message = dict[str, Any]


class ToolLimits(NamedTuple):
    """What a call may take."""

    timeout_s: float = 20.0
    """Seconds; environment.tool_timeout_s."""
    max_result_characters: int = 16384
    """Of the result as JSON; environment.max_result_characters."""


class ToolFailed(Exception):
    """A tool's error that is told as it is, without the name of this class."""


class OutcomeUnknown(BaseException):
    """An earlier attempt called the tool, and whether that had an effect is not known. No environment should catch it."""


class CallJournal:
    """The episode's calls, which the gateway keeps on record."""

    def __init__(self, base_url: str, api_key: str, limits: ToolLimits | None = None) -> None:
        self.base_url, self.api_key, self.limits = base_url, api_key, limits or ToolLimits()
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def begin_episode(self) -> Message | None:
        """Return the snapshot from which it goes on; None: it begins. Raises OutcomeUnknown if it may not begin again after a worker was lost."""
        snapshot: Message | None = self._sent("/episodes", {})["snapshot"]
        if snapshot is not None:
            self.counts.update(snapshot["num_calls"])
        return snapshot

    def save(self, num_turns: int, state: Message) -> None:
        """Put a snapshot on record, with which the episode can go on after num_turns turns."""
        self._sent("/snapshots", {"num_turns": num_turns, "state": state | {"num_calls": self.counts}})

    def begin(self, name: str, arguments: dict[str, Any], is_idempotent: bool) -> Message:
        """Returns the record: whether it is done, with its result, and its key.

        Raises:
            OutcomeUnknown: if the call must not be made.
        """
        words = json.dumps([name, arguments], sort_keys=True)
        with self.lock:
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
"""Of the episode under way; None outside of episodes, where a tool is a plain function, and in threads without a context."""
_EPISODE: list[CallJournal] = []
"""Of the episode that this process plays: a thread that an environment started by itself has no context, and its calls are the episode's too."""
KEY: ContextVar[str] = ContextVar("key", default="")


@contextmanager
def in_episode(journal: CallJournal) -> Iterator[None]:
    """Have the calls of tools in the block on record, in all threads."""
    token = JOURNAL.set(journal)
    _EPISODE.append(journal)
    try:
        yield
    finally:
        _EPISODE.remove(journal)
        JOURNAL.reset(token)


def call_key() -> str:
    """Return the key of the call under way, for a service that knows idempotency keys: the same when the call is repeated after a crash.
    Empty outside of episodes."""
    return KEY.get()


class Tool:
    def __init__(self, function: Callable[..., Any], *, idempotent: bool = False) -> None:
        """Raises ValueError for an async function."""
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"tool {function.__name__!r} is async: a tool is a plain function, write it with def")
        self.function, self.name, self.is_idempotent = function, function.__name__, idempotent
        self.__doc__ = function.__doc__
        self.signature = inspect.signature(function)

    @property
    def schema(self) -> Message:
        """As the field `tools` of OpenAI's requests wants it."""
        properties, required, kinds = {}, [], get_type_hints(self.function)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(
                    f"tool {self.name!r}: parameter {parameter} has no name in a model's call: write it without *, ** and /"
                )
            kind: Any = kinds.get(name)
            if kind not in TYPES:
                raise ValueError(
                    f"tool {self.name!r}: parameter {name!r} must be one of {', '.join(each.__name__ for each in TYPES)}"
                )
            properties[name] = {"type": TYPES[kind]}
            required += [name] if parameter.default is parameter.empty else []
        parameters = {"type": "object", "properties": properties, "required": required}
        about = inspect.cleandoc(self.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def __call__(self, /, *positional: Any, **named: Any) -> Any:
        """Call it, once in an episode and all its attempts.

        Raises:
            OutcomeUnknown: if it must not be called again.
        """
        if (journal := JOURNAL.get() or next(iter(_EPISODE), None)) is None:
            return self.function(*positional, **named)
        arguments = self.bound(positional, named)
        call = journal.begin(self.name, arguments, self.is_idempotent)
        if call["is_done"]:
            return call["result"]
        token = KEY.set(call["key"])
        try:
            result, is_error = self._made(arguments, journal.limits)
        finally:
            KEY.reset(token)
        journal.finish(call["key"], result, is_error)
        return result

    def bound(self, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by their names. Raises TypeError if it cannot be called with them."""
        return dict(self.signature.bind(*positional, **named).arguments)

    def called(self, arguments: dict[str, Any], limits: ToolLimits) -> Any:
        """Return its result. Raises what the tool raises, and ToolTimeOut."""
        return call_within(limits.timeout_s, self.function, arguments)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises TypeError for arguments with which it cannot be called."""
        self.signature.bind(**arguments)

    def _made(self, arguments: dict[str, Any], limits: ToolLimits) -> tuple[Any, bool]:
        """Make the call. Returns its result, as the journal has it, and whether it is an error."""
        try:
            return _within(self.called(arguments, limits), limits.max_result_characters), False
        except StepTimeOut:
            raise
        except ToolFailed as error:
            text = f"{error}"
        except ToolTimeOut as error:
            text = f"{self.name!r} {error}"
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's tool: its error is its result
            text = f"{type(error).__name__}: {error}"
        return f"{ERROR}{text}".encode(errors="replace").decode()[:MAX_ERROR_CHARACTERS], True


def _within(result: object, most: int) -> Any:  # Any: JSON
    """Return a result as it comes back from the journal; the middle of a longer text is left out.

    Raises:
        ToolFailed: for a result that is no JSON, or too long and no text.
    """
    if isinstance(result, str) and len(result) > most:
        result = f"{result[: most // 2]}{CUT}{result[len(result) - most // 2 :]}"
    try:
        text = json.dumps(result, allow_nan=False)
        found = _journaled(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolFailed(f"the result is no JSON: {error}") from None
    if not isinstance(result, str) and len(text) > most:
        raise ToolFailed(f"the result has {len(text)} characters, {most} are allowed")
    return found


def _journaled(text: str) -> Any:  # Any: JSON
    """Read JSON that the journal can write: it has its own limit on depth. Raises ValueError or TypeError for other texts."""
    import orjson  # not in verifiers' environment, whose workers import this module too

    found = orjson.loads(text)
    orjson.dumps(found)
    return found


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
    if len(known) < len(tools):
        raise ValueError(f"two tools have one name, of {', '.join(each.name for each in tools)}: rename one")
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": _answer(known, call["function"])}
        for call in message.get("tool_calls") or ()
    ]


def _answer(known: dict[str, Tool], call: Message) -> str:
    if call["name"] not in known:
        return f"{ERROR}no tool {call['name']!r}; there are {', '.join(known)}"
    wanted = known[call["name"]]
    try:
        arguments = _journaled(call["arguments"])
        wanted.check(arguments)
    except (ValueError, TypeError, RecursionError) as error:
        return f"{ERROR}arguments of {call['name']!r}: {error}"
    result = wanted(**arguments)
    return result if isinstance(result, str) else json.dumps(result)
