"""Snapshots of an environment's state on record, so that an episode that is begun again goes on from the latest one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.gateway.rendering.messages import BadRequest
from infra.gateway.session.calls import Calls


@dataclass(frozen=True)
class SnapshotRecord:
    """A line of the turns' journal, after the turn to which it belongs."""

    episode: str
    num_turns: int
    """Turns of the episode that it has behind it."""
    state: Any  # Any: JSON
    """What the worker needs to go on: the environment's state, the conversation and the rewards."""
    calls: list[str]
    """Keys of the tools' calls that were made before."""


class Snapshots:
    """Those of an episode, of which the latest counts."""

    def __init__(
        self,
        calls: Calls,
        on_snapshot: Callable[[SnapshotRecord], object] = lambda record: None,
        recorded: SnapshotRecord | None = None,
    ) -> None:
        """calls: Of the episode. on_snapshot: Called with each record. recorded: The latest of earlier attempts."""
        self.calls, self.on_snapshot, self.latest = calls, on_snapshot, recorded
        self.num_resumed = 0
        """How often the episode went on from one."""

    def save(self, fields: object) -> None:
        """Put a snapshot on record.

        Raises:
            BadRequest: for a request that is none.
        """
        if not isinstance(fields, dict) or set(fields) != {"num_turns", "state"} or type(fields["num_turns"]) is not int:
            raise BadRequest("a snapshot has the fields num_turns, a whole number, and state")
        self.latest = SnapshotRecord(self.calls.episode, fields["num_turns"], fields["state"], sorted(self.calls.asked))
        self.on_snapshot(self.latest)

    def begin_episode(self) -> Any:  # Any: JSON
        """Return the state from which the episode goes on, whose calls count as made by it; None: it begins at its beginning."""
        if self.latest is None:
            return None
        self.num_resumed += 1
        self.calls.asked |= set(self.latest.calls)
        return self.latest.state
