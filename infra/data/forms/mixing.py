"""Several sources in one endless sequence of prompts: which source stands at which position, by their weights alone.

Position p goes to the source that is furthest behind its share of p + 1 prompts. So every stretch of the sequence has each source's share, to
one prompt or two, and a step finds its rows again whenever it is made. Each source is shuffled and repeated for itself.
"""

import math
import threading
from collections.abc import Sequence
from functools import cache

from infra.config import DataConfig
from infra.data import dataset
from infra.data.dataset import Window

_LOCK = threading.Lock()
"""The next rollout may be prepared in a background thread during the step."""


def numbers_at(config: DataConfig, usable: Sequence[int], first: int, count: int, seed: int, size: int | None) -> list[int]:
    """The rows at the positions [first, first + count).

    size: Number of prompts that follow each other among which no row may stand twice; None: they may.

    Raises:
        ValueError: for a source with too few usable rows.
    """
    rows = _by_source(config, usable)
    weights = config.weights or [float(len(of_source)) for of_source in rows]
    windows = [None if size is None else _window(config, rows, weights, source, size) for source in range(len(rows))]
    sources = sources_at(weights, 0, first + count)
    drawn = []
    for source, of_source in enumerate(rows):
        begin, end = sources[:first].count(source), sources.count(source)
        order = dataset.order(len(of_source), begin, end - begin, seed + source, windows[source]) if of_source else []
        drawn.append(iter([of_source[number] for number in order]))
    return [next(drawn[source]) for source in sources[first:]]


def _by_source(config: DataConfig, usable: Sequence[int]) -> list[list[int]]:
    begin, rows = 0, []
    for size in dataset.loaded(config).sizes:
        rows.append([number for number in usable if begin <= number < begin + size])
        begin += size
    return rows


def _window(config: DataConfig, rows: Sequence[Sequence[int]], weights: Sequence[float], source: int, size: int) -> Window:
    window = Window(most_in(weights, source, size), is_aligned=False)
    if len(rows[source]) < max(1, window.min_rows):
        raise ValueError(
            f"data.sources {config.sources[source]!r} has {len(rows[source])} usable rows for up to {window.size} of the {size} prompts of a step: "
            f"it needs {max(1, window.min_rows)}. Lower its weight or data.num_prompts, or set data.allow_repeats"
        )
    return window


def most_in(weights: Sequence[float], source: int, size: int) -> int:
    """The largest number of prompts of a source among that many positions which follow each other."""
    return min(size, math.ceil(size * weights[source] / sum(weights)) + 1)


def sources_at(weights: Sequence[float], start: int, end: int) -> list[int]:
    """The sources at the positions [start, end)."""
    with _LOCK:
        return _sequence(tuple(weights)).up_to(end)[start:end]


class _Sequence:
    def __init__(self, weights: tuple[float, ...]) -> None:
        self.shares = [weight / sum(weights) for weight in weights]
        self.sources: list[int] = []
        self.counts = [0] * len(weights)

    def up_to(self, end: int) -> list[int]:
        for position in range(len(self.sources), end):
            behind = [share * (position + 1) - count for share, count in zip(self.shares, self.counts, strict=True)]
            source = max(range(len(behind)), key=behind.__getitem__)
            self.sources.append(source)
            self.counts[source] += 1
        return self.sources


@cache
def _sequence(weights: tuple[float, ...]) -> _Sequence:
    return _Sequence(weights)
