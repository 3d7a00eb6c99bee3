"""The part of a rollout that one server samples, as seen by the server's client."""

from typing import Protocol

from infra.concurrency.deadline import Deadline

Key = tuple[int, int]
"""Prompt id and sample index."""


class Share(Protocol):
    """One replica's part of a rollout. Samples may move to another replica until their requests are sent."""

    @property
    def is_first(self) -> bool:
        """Whether the replica begins with this rollout. A later share joins requests that are under way: nothing may be reset for it."""

    def begins(self, key: Key) -> bool:
        """Whether the replica still has to make this sample. Called right before its request is sent."""

    def is_over(self) -> bool:
        """Whether the rollout needs nothing more from any replica: requests under way may be aborted."""


class _WholeRollout:
    is_first = True

    def begins(self, key: Key) -> bool:
        return True

    def is_over(self) -> bool:
        return False


WHOLE: Share = _WholeRollout()
"""The only share of a rollout by one server."""


class UntilDeadline:
    """The only share of a rollout that has a deadline."""

    is_first = True

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline

    def begins(self, key: Key) -> bool:
        return not self.deadline.is_over

    def is_over(self) -> bool:
        return self.deadline.is_over
