"""Charts of a comparison: bars with spread, lines step by step, memory over time. matplotlib is an extra (`notebooks`)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.comparison.config import Backend
from infra.comparison.report import TWIN, Results, rows_of, short, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS: dict[Backend, str] = {"vllm": "tab:orange", "sglang": "tab:blue"}
LINES = ("tokens_per_s", "ttft_s", "inter_token_s", "transition_s", "training_s", "step_s")
PHASES = {"inference": "0.92", "after_release": "0.85", "training": "0.78"}
BARS_A_ROW = 4
HEADROOM = 1.06
DPI = 110


def is_available() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def bars(results: Results) -> "Figure":
    """A panel for each metric: medians, from the lowest to the highest value as a line."""
    rows = rows_of(results)
    figure, panels = _figure(len(rows), BARS_A_ROW)
    for row, panel in zip(rows, panels, strict=False):
        for place, backend in enumerate(results.config.backends):
            found = row.summaries[backend]
            if found is None:
                panel.text(place, 0, "none", ha="center", va="bottom")
                continue
            spread = [[found.median - found.low], [found.high - found.median]]
            panel.bar(place, found.median, yerr=spread, color=COLORS[backend], capsize=4)
        panel.set_xticks(range(len(results.config.backends)), [short(results, b) for b in results.config.backends])
        _from_zero(panel)
        panel.set_title(row.metric.title, fontsize=9)
    return _finished(figure, results, "median and spread")


def lines(results: Results) -> "Figure":
    """A panel for each metric: its value in every step, a line for each engine and round."""
    figure, panels = _figure(len(LINES), 3)
    for name, panel in zip(LINES, panels, strict=False):
        for backend in results.config.backends:
            if not values(results, backend, name):
                continue
            for number in range(results.config.rounds):
                steps = [s for s in results.of(backend) if s.round == number and s.is_sound]
                found = [(s.step, s.figures()[name]) for s in steps if name in s.figures()]
                panel.plot(
                    [step for step, _ in found],
                    [value for _, value in found],
                    color=COLORS[backend],
                    alpha=1 - 0.6 * number / results.config.rounds,
                    marker="o",
                    label=f"{short(results, backend)}, round {number}",
                )
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("step")
        _from_zero(panel)
    if panels:
        panels[0].legend(fontsize=7)
    return _finished(figure, results, "step by step")


def memory(results: Results) -> "Figure":
    """A panel for each engine: memory over the seconds of all its steps in the first round, phases shaded."""
    figure, panels = _figure(len(results.config.backends), 1)
    for backend, panel in zip(results.config.backends, panels, strict=False):
        begin = 0.0
        for step in [step for step in results.of(backend) if step.round == 0 and step.trace]:
            at = [begin + seconds for seconds, _, _ in step.trace]
            panel.plot(at, [gib for _, gib, _ in step.trace], color=COLORS[backend])
            for phase, shade in PHASES.items():
                inside = [place for place, (_, _, name) in zip(at, step.trace, strict=True) if name == phase]
                if inside:
                    panel.axvspan(min(inside), max(inside), color=shade, label=phase if begin == 0 else None, zorder=0)
            begin = at[-1]
        panel.set_title(f"{short(results, backend)}: memory in use", fontsize=9)
        panel.set_xlabel("seconds")
        panel.set_ylabel("GiB")
        _from_zero(panel)
        panel.legend(fontsize=7)
    return _finished(figure, results, "memory over time")


def _from_zero(panel: "Axes") -> None:
    """With room above the highest value: a marker is not cut."""
    panel.set_ylim(0, HEADROOM * panel.get_ylim()[1])


def png(figure: "Figure") -> bytes:
    """For notebooks."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def write(results: Results, folder: Path) -> list[Path]:
    """bars.png, lines.png and memory.png."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for draw in (bars, lines, memory):
        made.append(folder / f"{draw.__name__}.png")
        draw(results).savefig(made[-1], dpi=DPI)
    return made


def _figure(num_panels: int, per_row: int) -> "tuple[Figure, Sequence[Axes]]":
    from matplotlib.figure import Figure

    num_rows = max(1, -(-num_panels // per_row))
    figure = Figure(figsize=(3.4 * per_row if per_row > 1 else 9, 2.5 * num_rows + 0.7))
    axes: Any = figure.subplots(num_rows, min(per_row, max(num_panels, 1)), squeeze=False)
    panels = [panel for row in axes for panel in row]
    for unused in panels[num_panels:]:
        unused.set_visible(False)
    return figure, panels[:num_panels]


def _finished(figure: "Figure", results: Results, title: str) -> "Figure":
    is_twin = any(start.is_twin for start in results.starts)
    figure.suptitle(f"{title}\n{TWIN}" if is_twin else title, fontsize=10, color="tab:red" if is_twin else "black")
    figure.tight_layout()
    return figure
