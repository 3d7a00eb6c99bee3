"""What happened in a session, for the figures of a step."""

import time
from dataclasses import dataclass


@dataclass
class SessionCounts:
    """What happened in a session."""

    turns: int = 0
    """Answers that the agent got."""
    recorded_turns: int = 0
    """Those of them that an earlier attempt had sampled, or a worker that was lost had got."""
    lost_turns: int = 0
    """Complete turns that are not used, because the episode began again without them."""
    branches: int = 0
    """Conversations after the first: histories that the agent edited, and others that it began."""
    prefix_mismatches: int = 0
    """Renderings that did not begin with the tokens on record; nothing of them counts as sampled."""
    sampled_tokens: int = 0
    given_tokens: int = 0
    first_at: float = 0.0
    """Time of the first request, by time.monotonic(); 0 if there was none."""
    model_s: float = 0.0
    """Seconds in which requests were answered."""

    @property
    def environment_s(self) -> float:
        """Seconds since the first request in which the model waited for the environment."""
        return max(0.0, time.monotonic() - self.first_at - self.model_s) if self.first_at else 0.0

    def begun_again(self, lost_turns: int) -> "SessionCounts":
        """Return the counts of an episode that begins again: what happened stays, what the agent got does not count."""
        return SessionCounts(
            lost_turns=lost_turns, prefix_mismatches=self.prefix_mismatches, first_at=self.first_at, model_s=self.model_s
        )
