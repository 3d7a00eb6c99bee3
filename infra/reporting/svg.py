"""Pictures as SVG text: no library to import, a millisecond each, and they are sharp in Prefect's pages, in MLflow's and in a browser."""

import base64
import math
from collections.abc import Sequence
from html import escape

INK, SOFT, GRID, PAPER = "#1f2933", "#67747f", "#e3e8ec", "#ffffff"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind people can tell apart."""
MAX_TICKS = 7


def document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">'
    )
    return "\n".join([head, rect(0, 0, width, height, PAPER), *parts, "</svg>"]) + "\n"


def rect(x: float, y: float, width: float, height: float, color: str, hint: str = "") -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}">{inside}</rect>'


def text(x: float, y: float, words: str, *, anchor: str = "start", color: str = INK, size: float = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size:g}"{weight}>{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}"/>'


def curve(points: Sequence[tuple[float, float]], color: str, *, dots: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"/>'
    return drawn + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in points if dots)


def ticks(low: float, high: float, count: int = MAX_TICKS) -> list[float]:
    """Round numbers from low to high, no more than count and at least one."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / count))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if span / (size * factor) < count)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def data_uri(picture: str) -> str:
    """To stand in Markdown: Prefect's pages show it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
