"""Seconds by phase."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Phases(dict[str, float]):
    """Seconds by phase, in the order of the phases."""

    def __init__(self, done: Mapping[str, float]) -> None:
        """done: Seconds of the phases that have just ended."""
        super().__init__(done)
        self.began_at = {name: time.time() - seconds for name, seconds in done.items()}
        """Start of each phase, in seconds since the epoch."""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        self.began_at.setdefault(name, time.time())
        begin = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - begin
        log.info("%s  %.1f s", name, self[name])
