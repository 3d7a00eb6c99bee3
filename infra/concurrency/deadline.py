"""One deadline for all parts of a piece of work. Parts may begin before its clock does."""

import asyncio
import math
import time
from collections.abc import Callable

LOOK_S = 0.2
"""Longest wait of a part, in seconds, before it looks whether the clock has begun."""


class Deadline:
    """A limit of time that begins once."""

    __slots__ = ("_at", "limit_s")  # without __dict__, as Prefetch, since it is a task's parameter

    def __init__(self, limit_s: float | None = None) -> None:
        """limit_s: Seconds from `begin` on. None: no limit."""
        self.limit_s = limit_s
        self._at: float | None = None

    def begin(self) -> "Deadline":
        """Start the clock. Later calls change nothing: an attempt that is made again has the rest of the time."""
        if self._at is None and self.limit_s is not None:
            self._at = time.monotonic() + self.limit_s
        return self

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, >= 0. None: there is no limit, or its clock has not begun."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    @property
    def may_begin(self) -> bool:
        """Whether there is a limit whose clock has not begun."""
        return self.limit_s is not None and self._at is None

    def at_most(self, seconds: float) -> float:
        """Shorten a time-out to what is left."""
        left_s = self.left_s
        return seconds if left_s is None else min(seconds, left_s)

    async def passes(self) -> None:
        """Return when it is over; never where there is no limit."""
        while not self.is_over:
            await asyncio.sleep(LOOK_S if self.left_s is None else min(LOOK_S, self.left_s))


class Until(Deadline):
    """A deadline that is over when something has happened, and then stays so."""

    __slots__ = ("_has_happened",)

    def __init__(self, has_happened: Callable[[], bool]) -> None:
        """has_happened: Cheap; called for each sample and several times a second."""
        super().__init__(math.inf)
        self._has_happened = has_happened

    @property
    def left_s(self) -> float | None:
        if self._at is None and self._has_happened():
            self._at = time.monotonic()
        return None if self._at is None else 0.0


NO_DEADLINE = Deadline()
