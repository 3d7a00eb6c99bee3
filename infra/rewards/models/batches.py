"""Conversations as token ids, and batches of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.data.chat_renderer import ChatRequest
from infra.data.chat_templates import of_model, rendered
from infra.models import base_model

Messages = list[dict[str, Any]]  # JSON


def tokens_of(folder: Path, conversations: Sequence[Messages]) -> list[list[int]]:
    """Return each conversation, whole, in the reward model's own chat template, as its tokenizer's `apply_chat_template` does.

    Raises:
        ValueError: for a template that fails or exceeds a limit.
    """
    if not conversations:
        return []
    tokenizer = base_model.tokenizer(folder)
    chats = [ChatRequest(messages=messages, tools=None, row={}, is_complete=True) for messages in conversations]
    found = tokenizer(rendered(of_model(folder, tokenizer), tokenizer, chats), add_special_tokens=False)["input_ids"]
    return [list(map(int, ids)) for ids in found]


def batches_of(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into batches of at most max_tokens, padding included; the longest come first, so that the largest batch does.

    What is in a batch rounds its scores. So batches are made of all rows of a scoring, never of those that are still missing: a scoring
    that goes on after a kill gives the same bits.

    Returns:
        Positions of the rows of each batch. A row that is longer than max_tokens is alone.
    """
    found: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > max_tokens:
            found.append([])
        found[-1].append(position)
    return found
