"""The curves of a run as one picture: a panel for each figure, over steps."""

from collections.abc import Sequence
from typing import NamedTuple

from infra.reporting import svg

WIDTH, HEIGHT, NUM_COLUMNS = 310.0, 190.0, 3
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 32.0, 30.0
MAX_DOTS = 40


class Panel(NamedTuple):
    title: str
    curves: dict[str, list[tuple[float, float]]]
    """Values over steps, in order, by name."""


def picture(panels: Sequence[Panel]) -> str:
    """Draw the panels as SVG. Panels without points are left out."""
    full = [panel for panel in panels if any(panel.curves.values())]
    num_rows = -(-len(full) // NUM_COLUMNS) or 1
    parts = [_panel(panel, n % NUM_COLUMNS * WIDTH, n // NUM_COLUMNS * HEIGHT, n) for n, panel in enumerate(full)]
    return svg.document(WIDTH * min(max(len(full), 1), NUM_COLUMNS), HEIGHT * num_rows, parts)


def _panel(panel: Panel, x0: float, y0: float, number: int) -> str:
    points = [point for curve in panel.curves.values() for point in curve]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = _range([y for _, y in points])
    across = (WIDTH - LEFT - RIGHT) / ((last - first) or 1.0)
    up = (HEIGHT - TOP - BOTTOM) / (high - low)

    def place(x: float, y: float) -> tuple[float, float]:
        middle = 0.0 if last > first else (WIDTH - LEFT - RIGHT) / 2
        return x0 + LEFT + middle + (x - first) * across, y0 + HEIGHT - BOTTOM - (y - low) * up

    parts = [svg.text(x0 + LEFT, y0 + 20, panel.title, bold=True)]
    for tick in svg.ticks(low, high, 5):
        _, y = place(first, tick)
        parts += [svg.line(x0 + LEFT, y, x0 + WIDTH - RIGHT, y)]
        parts += [svg.text(x0 + LEFT - 6, y + 4, f"{tick:g}", anchor="end", color=svg.SOFT, size=10)]
    for tick in svg.ticks(first, last, 6):
        if tick == round(tick):
            x, _ = place(tick, low)
            parts.append(svg.text(x, y0 + HEIGHT - 12, f"{tick:g}", anchor="middle", color=svg.SOFT, size=10))
    right = x0 + WIDTH - RIGHT
    for n, (name, curve) in reversed(list(enumerate(panel.curves.items()))):
        color = svg.COLORS[(number + n) % len(svg.COLORS)]
        parts.append(svg.curve([place(x, y) for x, y in curve], color, dots=len(curve) <= MAX_DOTS))
        if len(panel.curves) > 1:
            parts.append(svg.text(right, y0 + 20, name, anchor="end", color=color, size=10))
            right -= 5.4 * len(name) + 8
    return "\n".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values need, never empty."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if low >= 0 > low - room else low - room), high + room
