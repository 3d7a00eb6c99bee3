"""What an engine is asked so that it shows that it still answers rightly: what it says of a few short texts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Question(NamedTuple):
    text: list[int]
    """Token ids."""
    adapter_name: str | None
    """None: the base model."""
    is_by_cache: bool = False
    """Of the end of the text, by way of the prefix cache where the engine has one; else of all of it, computed now."""


class Said(NamedTuple):
    text: list[int]
    """That of the question; by way of the prefix cache it may go on with a few tokens of the engine's own, chosen greedily."""
    logprobs: list[float]
    """Of the text's last tokens: of all but the first, or, by way of the prefix cache, of some. Nats, at temperature 1."""


Ask = Callable[[Sequence[Question]], list[Said]]
"""Several questions in one call are one batch where the engine can do that; a batch rounds otherwise than a text alone."""
