"""A step as a picture: who worked when (engine, trainer, CPU and store), and the memory in use under it.

Times are those that were recorded while it ran: measures/<verb>.json, the trainer's result.json, machine_load.json. What was taken from
a cache or made by an earlier attempt lies before the beginning and is left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from infra.reporting import svg
from infra.telemetry.system_metrics import AT, Row
from infra.telemetry.timings import BEGAN_AT, DRAW, SECONDS

LANES = ("engine", "trainer", "CPU, store")
LANE_OF = {"wake": "engine", "roll_out": "engine", "release": "engine", "reload": "engine", "train": "trainer"}
LANE_OF |= {"start_judge": "engine", "judge": "engine"}  # its server has the engine's GPUs then
COLOR_OF = {
    "wake": "#8fc6e8",
    "roll_out": "#0072b2",
    "release": "#c9b8e6",
    "reload": "#8fc6e8",
    "start_judge": "#e3a1c4",
    "judge": "#cc79a7",
    "start": "#f7e0cc",
    "import": "#f3c9a5",
    "build": "#f3c9a5",
    "load": "#eda96b",
    "adapter": "#f3c9a5",
    "train": "#d55e00",
    "export": "#eda96b",
}
OTHER_COLOR = "#7fb99f"
MEMORY = {
    "system/engine_memory_megabytes": ("engine", svg.COLORS[0]),
    "system/trainer_memory_megabytes": ("trainer", svg.COLORS[1]),
    "system/system_memory_usage_megabytes": ("whole machine", svg.SOFT),
}
WIDTH, LEFT, RIGHT, TOP = 960.0, 96.0, 16.0, 34.0
LANE_HEIGHT, BAR_HEIGHT, MEMORY_HEIGHT = 34.0, 24.0, 110.0


class Span(NamedTuple):
    lane: str
    name: str
    begin: float
    """Seconds since the step began."""
    end: float


def spans_of(
    began: float, measures: dict[str, dict[str, float]], phases_began: dict[str, float], phase_seconds: dict[str, float]
) -> list[Span]:
    """began and phases_began: seconds since the epoch; the trainer's phases stand for `train` where they are known."""
    found = [
        Span(
            LANE_OF.get(verb.partition(DRAW)[0], LANES[2]),
            verb,
            figures[BEGAN_AT] - began,
            figures[BEGAN_AT] - began + figures[SECONDS],
        )
        for verb, figures in measures.items()
        if BEGAN_AT in figures
    ]
    phases = [
        Span(LANES[1], name, at - began, at - began + phase_seconds[name])
        for name, at in phases_began.items()
        if at >= began and phase_seconds[name] > 0
    ]
    whole = next((span for span in found if span.name == "train"), None)
    if phases and whole:
        found.remove(whole)
        if (first := min(span.begin for span in phases)) > whole.begin:
            phases.append(Span(LANES[1], "start", whole.begin, first))
    spans = found + phases
    return sorted((span for span in spans if span.begin >= 0), key=lambda span: span.begin)


def picture(title: str, spans: Sequence[Span], rows: Sequence[Row], began: float) -> str:
    """As SVG; where the memory is not known, without it."""
    memory = _memory(rows, began)
    end = max([span.end for span in spans] + [at for points in memory.values() for at, _ in points] + [1.0])
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = TOP + LANE_HEIGHT * len(LANES)
    parts = [svg.text(LEFT, 20, title, bold=True, size=14)]
    for tick in svg.ticks(0, end, 10):
        x = LEFT + tick * scale
        parts += [svg.line(x, TOP, x, bottom), svg.text(x, bottom + 15, f"{tick:g} s", anchor="middle", color=svg.SOFT, size=11)]
    parts += [_lane(number, lane, [span for span in spans if span.lane == lane], scale) for number, lane in enumerate(LANES)]
    if not memory:
        return svg.document(WIDTH, bottom + 24, parts)
    top = bottom + 44
    parts.append(_memory_plot(memory, top, scale, end))
    return svg.document(WIDTH, top + MEMORY_HEIGHT + 12, parts)


def _lane(number: int, lane: str, spans: Sequence[Span], scale: float) -> str:
    y = TOP + number * LANE_HEIGHT
    parts = [svg.line(LEFT, y + LANE_HEIGHT, WIDTH - RIGHT, y + LANE_HEIGHT), svg.text(LEFT - 10, y + 21, lane, anchor="end")]
    free_from = 0.0
    for span in spans:
        x, width = LEFT + span.begin * scale, max((span.end - span.begin) * scale, 1.0)
        color = COLOR_OF.get(span.name.partition(DRAW)[0], OTHER_COLOR)
        said = f"{span.name} {span.end - span.begin:.1f} s"
        parts.append(svg.rect(x, y + 5, width, BAR_HEIGHT, color, said))
        room, ink = width, "#ffffff" if color in ("#0072b2", "#d55e00") else svg.INK
        if label := next((words for words in (said, span.name) if 6.2 * len(words) + 6 <= room), ""):
            parts.append(svg.text(max(x, free_from) + 4, y + 21, label, color=ink, size=11))
        free_from = x + width
    return "\n".join(parts)


def _memory(rows: Sequence[Row], began: float) -> dict[str, list[tuple[float, float]]]:
    """GiB over seconds, by the names in MEMORY; all GPUs together are one more."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        at = row[AT] - began
        if at < 0:
            continue
        used = {name: row[name] for name in MEMORY if name in row}
        gpus = [value for name, value in row.items() if name.startswith("system/gpu_") and "_memory_usage_" in name]
        used |= {"gpu": sum(gpus)} if gpus else {}
        for name, mib in used.items():
            found.setdefault(name, []).append((at, mib / 1024))
    return found


def _memory_plot(memory: dict[str, list[tuple[float, float]]], top: float, scale: float, end: float) -> str:
    highest = max(gib for points in memory.values() for _, gib in points) or 1.0
    height = MEMORY_HEIGHT / (1.08 * highest)
    base = top + MEMORY_HEIGHT
    parts = []
    for tick in svg.ticks(0, highest * 1.08, 4):
        y = base - tick * height
        parts += [svg.line(LEFT, y, LEFT + end * scale, y), svg.text(LEFT - 10, y + 4, f"{tick:g} GiB", anchor="end", size=11)]
    x = LEFT
    for name, points in memory.items():
        label, color = ("GPU memory", svg.COLORS[2]) if name == "gpu" else MEMORY[name]
        parts.append(svg.curve([(LEFT + at * scale, base - gib * height) for at, gib in points], color))
        parts += [svg.rect(x, top - 15, 10, 10, color), svg.text(x + 15, top - 6, label, size=11)]
        x += 30 + 6.5 * len(label)
    return "\n".join(parts)
