"""Chat templates of known families, and random conversations."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import published_templates as published

from infra.gateway.rendering.messages import ChatMessage, ToolCall
from infra.tiny_model.tokenizer import CHAT_TEMPLATE

TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
TEMPLATES = {
    "ChatML": CHAT_TEMPLATE,
    "Qwen2.5": published.QWEN25,
    "Qwen3": published.QWEN3,
    "Llama 3": published.LLAMA3,
    "Llama 3.1": published.LLAMA31,
}
MakeModel = Callable[[str], Path]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers, naïvely.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
    },
}
WORDS = [
    "pens",
    " 12",
    "\n",
    "\n\n",
    " ",
    "Ben",
    "東京",
    "naïve",
    '"x"',
    "<b>",
    "#### 4",
    "{",
    "}",
    "  two",
    "é",
    "🙂",
    "\tend",
    ".",
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(1, 9)))


def random_call(rng: random.Random) -> ToolCall:
    return ToolCall("", "add", json.dumps({"a": rng.randrange(100), "b": random_text(rng)}, ensure_ascii=False))


def random_given(rng: random.Random, after_call: bool) -> list[ChatMessage]:
    """What follows an answer: a tool's results, a user's message, or both."""
    results = [ChatMessage("tool", random_text(rng)) for _ in range(rng.randrange(1, 3) if after_call else 0)]
    asks = not results or rng.random() < 0.3
    return [*results, *([ChatMessage("user", random_text(rng))] if asks else [])]
