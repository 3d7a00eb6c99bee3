"""Time each request of a rollout, as seen by its client: for comparing engines, not for making steps.

    load = Load(concurrency=8)
    engine.generate(request, SampleSink(load=load))
    load.requests

Timed requests are streamed, so that the time of the first token is known. Other requests do not pay for streaming.
"""

from typing import NamedTuple


class RequestTiming(NamedTuple):
    """Seconds of one request, by the client's clock."""

    ttft_s: float
    """Seconds from the request to its first token."""
    latency_s: float
    """Seconds from the request to its last token."""
    num_tokens: int

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between two tokens; None if there is only one token."""
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class Load:
    """How many requests run at a time, and the timing of each."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.requests: list[RequestTiming] = []
        self.seconds = 0.0
        """Seconds from the first request to the last token, over all rollouts that used it."""
