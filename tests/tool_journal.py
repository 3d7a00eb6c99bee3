"""A journal of tools' calls without a gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.environments.tools import CallJournal, ToolLimits, in_episode


class Recorded(CallJournal):
    """It remembers the results."""

    def __init__(self, limits: ToolLimits) -> None:
        super().__init__("", "", limits)
        self.results: list[tuple[Any, bool]] = []

    def begin(self, name: str, arguments: dict[str, Any], is_idempotent: bool) -> dict[str, Any]:
        return {"key": "k1", "is_done": False}

    def finish(self, key: str, result: object, is_error: bool) -> None:
        self.results.append((result, is_error))


@contextmanager
def recorded(limits: ToolLimits | None = None) -> Iterator[Recorded]:
    """Have the tools that are called in the block on record, as in an episode."""
    journal = Recorded(limits or ToolLimits())
    with in_episode(journal):
        yield journal
