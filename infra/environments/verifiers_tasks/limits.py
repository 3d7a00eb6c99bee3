"""What holds for the episode under way, where a harness finds it: verifiers has no place for it."""

from contextvars import ContextVar
from typing import NamedTuple

from infra.environments.tools import CallJournal


class Limits(NamedTuple):
    """Of the episode under way; see the section `environment`."""

    turn_timeout_s: float
    max_observation_tokens: int
    tokenizer: str
    """Path of the model's tokenizer.json."""
    journal: CallJournal
    repeats_tools: bool


LIMITS: ContextVar[Limits] = ContextVar("limits")
