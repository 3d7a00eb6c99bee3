"""Questions in a model's chat template, rendered by a child program that is ended where a template takes too long or too much.

A template is code from the model's folder: nested loops in it would keep this process for ever. One child serves all calls of a process.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from infra.data.chat_renderer import ChatRequest, Reply, Request
from infra.processes.child_environment import passed_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from infra.models.fast_tokenizer import FastTokenizer

CPU_LIMIT_S = 10
"""For one call, in seconds of the child's CPU time, which another program's load does not use up. 1,024 usual prompts take 0.05."""
DEADLINE_S = 120.0
"""For one call, in seconds of the clock."""
MAX_GROWTH, MAX_EXTRA_CHARACTERS = 10, 100_000
"""Limit of a chat's characters: a multiple of its question's, and an allowance."""


class Renderer:
    """The child program; started by the first call, and again by the next one after it was ended."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # the next rollout's prompts may be drawn in a background thread

    def ask(self, request: Request) -> Reply:
        """Raises ValueError where the child was ended by a limit or could not work."""
        with self._lock:
            child = self._child = self._child or _start()
            timer = threading.Timer(DEADLINE_S, child.kill)
            timer.start()
            try:
                line = _exchange(child, json.dumps(request) + "\n")
            finally:
                timer.cancel()
            if not line.endswith("\n"):
                self._child = None
                raise ValueError(_why_ended(child, request["cpu_limit_s"]))
            reply: Reply = json.loads(line)
            return reply

    def stop(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            child, self._child = self._child, None
        if child:
            child.kill()
            child.communicate()


def _start() -> "subprocess.Popen[str]":
    # A session of its own: Ctrl-C is for the program that waits for it, and ends its input.
    return subprocess.Popen(
        [sys.executable, "-m", "infra.data.chat_renderer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=passed_on(),
        start_new_session=True,
    )


def _exchange(child: "subprocess.Popen[str]", line: str) -> str:
    """The child's answer; cut short or empty where it ended."""
    assert child.stdin and child.stdout
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        return ""
    return child.stdout.readline()


def _why_ended(child: "subprocess.Popen[str]", cpu_limit_s: int) -> str:
    errors = child.communicate()[1]
    match -child.returncode:
        case signal.SIGXCPU:
            return f"it takes more than {cpu_limit_s} s of CPU time"
        case signal.SIGKILL:
            return f"it takes more than {DEADLINE_S:g} s"
    return f"its program ended with {child.returncode}: {errors.strip()[-300:]}"


_renderer = Renderer()
atexit.register(_renderer.stop)


def _forget() -> None:
    """A fork shares the pipes of its parent's child, and would read its answers."""
    global _renderer
    _renderer = Renderer()


os.register_at_fork(after_in_child=_forget)


class ChatTemplate(NamedTuple):
    """A Jinja template and what it is called in errors."""

    source: str
    name: str
    variables: Mapping[str, object] = MappingProxyType({})
    """Further variables that it gets, such as enable_thinking."""


def of_model(folder: Path, tokenizer: "FastTokenizer | PreTrainedTokenizerBase") -> ChatTemplate:
    """Raises ValueError for a model without a chat template."""
    try:
        return ChatTemplate(str(tokenizer.get_chat_template()), f"the chat template of model folder {folder}")
    except ValueError as error:
        raise ValueError(f"model folder {folder} has no chat template to put questions in: {_one_line(error)}") from error


def rendered(
    template: ChatTemplate, tokenizer: "FastTokenizer | PreTrainedTokenizerBase", chats: Sequence[ChatRequest]
) -> list[str]:
    """Each chat in the template, with the opening of the assistant's turn behind it, or up to the end of the assistant's message.

    Raises:
        ValueError: for a template that fails or exceeds a limit.
    """
    if not chats:
        return []
    request = Request(
        template=template.source,
        special_tokens=tokenizer.special_tokens_map,
        variables=dict(template.variables),
        chats=list(chats),
        cpu_limit_s=CPU_LIMIT_S,
        max_growth=MAX_GROWTH,
        max_extra=MAX_EXTRA_CHARACTERS,
    )
    try:
        reply = _renderer.ask(request)
        if "error" in reply:
            raise ValueError(reply["error"])
    except ValueError as error:
        raise ValueError(f"{template.name} cannot be used for {_num(chats)}: {_one_line(error)}") from error
    return reply["texts"]


def _num(chats: Sequence[ChatRequest]) -> str:
    return "a question" if len(chats) == 1 else f"{len(chats)} questions"


def _one_line(error: ValueError) -> str:
    return " ".join(str(error).split())[:300]
