"""Find the renderer of a model, and admit it only if it renders what the model's own chat template does, id for id.

Families are known by what their templates do, not by names: each renderer is tried on a few conversations, and the first that agrees in
all of them is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.data import chat_templates
from infra.data.chat_renderer import ChatRequest
from infra.data.chat_templates import ChatTemplate
from infra.gateway.rendering.chatml import QWEN25_SYSTEM, ChatML, Qwen3
from infra.gateway.rendering.interface import ConversationRenderer
from infra.gateway.rendering.llama3 import Llama3
from infra.gateway.rendering.messages import BadRequest, ChatMessage, ToolCall
from infra.gateway.rendering.token_text import TokenText
from infra.models import base_model

CALL = ToolCall("a", "add", '{"a": 17, "b": 25}')
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object", "properties": {}}},
}
QUESTION, ANSWER = ChatMessage("user", " What is 17 + 25? "), ChatMessage("assistant", "It is\n42.")
SYSTEM, MORE = ChatMessage("system", "Be brief."), ChatMessage("user", "Naïve façade, 東京?")
TALKS = ([QUESTION], [SYSTEM, QUESTION], [QUESTION, ANSWER, MORE], [SYSTEM, QUESTION, ANSWER, MORE, ANSWER, QUESTION])
"""Conversations that every renderer must render as the template does."""
TOOL_TALKS = (
    [QUESTION],
    [SYSTEM, QUESTION, ChatMessage("assistant", "", (CALL,)), ChatMessage("tool", "42")],
    [QUESTION, ChatMessage("assistant", "", (CALL,)), ChatMessage("tool", "42"), ANSWER, MORE],
)
"""The same for templates that know tools."""
REASONED = ([QUESTION, ChatMessage("assistant", "It is 42.", reasoning="17 + 25"), MORE],)


def renderer_of(folder: Path) -> ConversationRenderer:
    """The admitted renderer of a model's folder.

    Raises:
        ValueError: in one line, if the model's chat template is none that is rendered exactly.
    """
    tokenizer = base_model.tokenizer(folder)
    template = chat_templates.of_model(folder, tokenizer)
    text, tried = TokenText(tokenizer), []
    for renderer, talks in _candidates(text):
        tried.append(renderer.family)
        if all(_agrees(renderer, template, tokenizer, talk, tools) for talk, tools in talks):
            return renderer
    raise ValueError(
        f"{template.name} is none that turns are sampled with exactly ({', '.join(KNOWN)} are known; tried {', '.join(tried) or 'none'}): "
        "take a model of one of these families"
    )


KNOWN = ("Qwen2.5", "Qwen3", "Llama 3", "Llama 3.1", "ChatML")
Talk = tuple[Sequence[ChatMessage], list[dict[str, Any]]]


def _candidates(text: TokenText) -> Iterator[tuple[ConversationRenderer, list[Talk]]]:
    plain: list[Talk] = [(talk, []) for talk in TALKS]
    with_tools = [*plain, *((talk, [TOOL]) for talk in TOOL_TALKS)]
    today = datetime.now().strftime("%d %b %Y")
    makes: list[tuple[Callable[[], ConversationRenderer], list[Talk]]] = [
        (lambda: ChatML(text, QWEN25_SYSTEM), with_tools),
        (lambda: Qwen3(text), [*with_tools, *((talk, []) for talk in REASONED)]),
        (lambda: Llama3(text), plain),
        (lambda: Llama3(text, today), with_tools),
        (lambda: Llama3(text, "26 Jul 2024"), with_tools),
        (lambda: ChatML(text), plain),
    ]
    for make, talks in makes:
        try:
            yield make(), talks
        except ValueError:  # its special tokens are not in the vocabulary
            continue


def _agrees(
    renderer: ConversationRenderer, template: ChatTemplate, tokenizer: Any, talk: Sequence[ChatMessage], tools: list[Any]
) -> bool:
    request = ChatRequest(messages=[message.to_json() for message in talk], tools=tools or None, row={})
    try:
        (text,) = chat_templates.rendered(template, tokenizer, [request])
        return renderer.render(talk, tools) == list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except (BadRequest, ValueError):
        return False
