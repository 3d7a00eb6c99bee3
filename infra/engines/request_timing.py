"""Rollouts whose requests are timed one by one, as their client sees them: for comparing engines, not for making steps.

    load = Load(concurrency=8)
    engine.generate(request, SampleSink(load=load))
    load.requests

Requests are streamed then, so that the first token has a time of its own; otherwise no request pays for that.
"""

from typing import NamedTuple


class RequestTiming(NamedTuple):
    """Seconds of one request, by the client's clock."""

    ttft_s: float
    """From the request to its first token."""
    latency_s: float
    """From the request to its last token."""
    num_tokens: int

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between two tokens; None where there is one token only."""
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class Load:
    """How many requests are under way at a time, and what each came to."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.requests: list[RequestTiming] = []
        self.seconds = 0.0
        """From the first request to the last token, of all rollouts that it was given to."""
