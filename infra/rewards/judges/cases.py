"""Requests to a judge and its answers, as records."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infra.rewards.outcome import JUDGE_UNAVAILABLE, TIME_OUT

Messages = Sequence[dict[str, Any]]  # Any: JSON
Schema = dict[str, Any]
"""A JSON schema with the keys `name` and `schema`."""


NO_CHAT = "no chat completion"
"""Finish reason of a reply that has another form."""


class JudgeRequest(NamedTuple):
    messages: Messages
    schema: Schema | None
    """Of the answer. None: it is text."""
    key: str
    """Digest of the model and of all that decides its answer."""


class JudgeAnswer(NamedTuple):
    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class JudgeAway(NamedTuple):
    """No answer came."""

    message: str
    reason: str = JUDGE_UNAVAILABLE


LATE = JudgeAway("reward.task_timeout_s was over", TIME_OUT)
"""The time of the whole scoring was over before an answer came."""


OnAnswer = Callable[[int, JudgeAnswer | JudgeAway], None]
Ask = Callable[[Sequence[JudgeRequest], OnAnswer], None]
"""Sends requests, and passes on what came of each as it comes. If the receiver raises, no further request is sent: those under way are
awaited, because their answers are paid, and then the error is raised."""


class Case(NamedTuple):
    """Samples that one request asks of: a sample for a rubric, a group for RULER."""

    indices: Sequence[int]
    """Positions of the samples."""
    messages: Messages
    schema: Schema | None
    read: Callable[[str], list[float]]
    """Returns a score for each sample. Raises ValueError for an answer that cannot be read."""


def key_of(model: str, deciding: Sequence[object], case: Case, vote: int) -> str:
    """Digest a request. deciding: Fields of the configuration that decide the answer besides the messages."""
    content = json.dumps([model, list(deciding), case.messages, case.schema, vote], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
