"""Timings of a step: seconds and figures that differ between identical runs, so records must not contain them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.store.files import read_note, write_note
from infra.store.layout import StepFolder

SECONDS, BEGAN_AT = "seconds", "began_at"
"""Stored with each block; the latter in seconds since the epoch."""


SUMMED = ("num_", SECONDS, "branches", "prefix_mismatches", "tool_", "resumed", "stopped", "model_s", "environment_s")
"""Beginnings of the names of seconds and counts."""
DRAW = "-draw-"
"""Between a verb and the number of the draw, in a step with dynamic sampling."""


def verb_of(verb: str, draw: int) -> str:
    """The name under which a draw's work is recorded; draw 0 is the step's own work."""
    return f"{verb}{DRAW}{draw:02d}" if draw else verb


def summed_draws(measures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the figures by verb, those of draws together: seconds and counts are sums, beginnings the first draw's, others the last one's."""
    found: dict[str, dict[str, float]] = {}
    for name, figures in sorted(measures.items()):
        verb, is_of_draw, _ = name.partition(DRAW)
        before = found.get(verb, {}) if is_of_draw else {}
        sums = {key: before[key] + figures[key] for key in figures if key in before and key.startswith(SUMMED)}
        firsts = {key: before[key] for key in (BEGAN_AT, "first_token_at") if before.get(key)}
        found[verb] = before | figures | sums | firsts
    return found


@contextmanager
def measured(run: str, step: int, verb: str) -> Iterator[dict[str, float]]:
    """Time the block and record its seconds with the entries that the caller adds to the dict. A failed block records nothing."""
    figures: dict[str, float] = {}
    began_at, start = time.time(), time.monotonic()
    yield figures
    figures |= {SECONDS: time.monotonic() - start, BEGAN_AT: began_at}
    write_note(folder_of(run, step) / f"{verb}.json", figures)


def measures_of(run: str, step: int, since: float = 0.0) -> dict[str, dict[str, float]]:
    """Return the figures by verb, of work that ended after a point in time (seconds since the epoch)."""
    paths = sorted(folder_of(run, step).glob("*.json"))
    noted = {path.stem: read_note(path, dict[str, float]) for path in paths if path.stat().st_mtime >= since}
    return {verb: figures for verb, figures in noted.items() if figures is not None}


def folder_of(run: str, step: int) -> Path:
    return StepFolder.at(run, step).timings
