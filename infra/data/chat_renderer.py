"""Program: render chat templates, which are code from the model's folder, within limits of time and memory that the kernel keeps.

infra.data.chat_templates --a line of JSON--> python -m infra.data.chat_renderer --a line of JSON--> infra.data.chat_templates

It needs jinja2 alone, so that it starts in a tenth of a second; a test compares it with what transformers renders. It ends with its input.
"""

import json
import resource
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NotRequired, TypedDict

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2 << 30
"""Address space of this program."""
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark behind an assistant's message that the model continues: what a template puts behind it is cut off."""


class ChatRequest(TypedDict):
    messages: list[dict[str, Any]]  # JSON
    tools: list[Any] | None
    row: dict[str, Any]
    """The columns of the row, for templates that are files of the user's."""
    is_complete: NotRequired[bool]
    """Whether the conversation is rendered to its end, for a reader: the model continues nothing."""


class Request(TypedDict):
    template: str
    special_tokens: dict[str, Any]  # text, or lists of it
    variables: dict[str, Any]
    """Further variables of the template, such as enable_thinking."""
    chats: list[ChatRequest]
    cpu_limit_s: int
    max_growth: int
    """A chat may have this many times the characters of its content ..."""
    max_extra: int
    """... and as many more."""


class Reply(TypedDict, total=False):
    texts: list[str]
    error: str


class Generation(ext.Extension):
    """The tags around what an assistant says, which change nothing in the text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


# Perf: a process of this program takes 0.2 s, with transformers imported 1 to 2 s (CPU, docs/history/decisions.md).
@lru_cache
def _compiled(template: str) -> jinja2.Template:
    """As transformers 5.12.1 does it in utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def texts_of(request: Request) -> list[str]:
    """Render each chat, with the opening of the assistant's turn behind it; a chat whose last message is the assistant's ends with that text,
    and a complete one with what the template puts behind its last message.

    Raises:
        ValueError: for a chat of more characters than the request allows.
    """
    template, texts = _compiled(request["template"]), []
    variables = {"documents": None} | request["special_tokens"] | request["variables"]
    for chat in request["chats"]:
        text = _text_of(template, chat, variables)
        size = _size_of(chat)
        if len(text) > request["max_growth"] * size + request["max_extra"]:
            raise ValueError(f"it makes {len(text)} characters of a question of {size}")
        texts.append(text)
    return texts


def _text_of(template: jinja2.Template, chat: ChatRequest, variables: dict[str, Any]) -> str:
    messages, row = chat["messages"], {"row": chat["row"]} if chat["row"] else {}
    is_complete = chat.get("is_complete", False)
    is_continued = not is_complete and bool(messages) and messages[-1]["role"] == "assistant"
    if is_continued:
        messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + CONTINUED}]
    opens_turn = not (is_continued or is_complete)
    text = template.render(messages=messages, tools=chat["tools"], add_generation_prompt=opens_turn, **(variables | row))
    return _up_to_the_mark(text) if is_continued else text


def _up_to_the_mark(text: str) -> str:
    """As transformers does it with continue_final_message: a template that trims messages trims the text to be continued."""
    before, mark, after = text.rpartition(CONTINUED.strip())
    if not mark:
        raise ValueError(
            "the assistant's last message, which the model would continue, does not appear in the text that it makes"
        )
    return before if after.startswith(CONTINUED[len(mark) :]) else before.rstrip()


def _size_of(chat: ChatRequest) -> int:
    """Characters of what goes in."""
    others = chat["tools"] or chat["row"]
    texts = [str(message.get("content") or "") for message in chat["messages"]]
    return sum(map(len, texts)) + (len(json.dumps([chat["tools"], chat["row"]])) if others else 0)


def answer(request: Request) -> Reply:
    try:
        return {"texts": texts_of(request)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # noqa: BLE001  # a template can raise anything, and all of it is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def limit_cpu(limit_s: int) -> None:
    """Have the kernel end this process when it has used that much more CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + limit_s + 1)


def _limit(kind: int, value: int) -> None:
    """Set a soft limit, or leave that of the machine where it is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    for line in sys.stdin:
        request: Request = json.loads(line)
        limit_cpu(request["cpu_limit_s"])
        print(json.dumps(answer(request)), flush=True)


if __name__ == "__main__":
    main()
