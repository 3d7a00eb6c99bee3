"""Seconds by phase."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Phases(dict[str, float]):
    """Seconds by phase, in the order of the phases."""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - begin
        log.info("%s  %.1f s", name, self[name])
