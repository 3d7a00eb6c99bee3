"""What can be said of the notebooks without running them; tests/test_end_to_end.py runs them on real runs."""

import ast

import matplotlib
import nbformat
import pandas as pd
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from infra.reporting.headline_metrics import PARTS
from infra.settings import CHECKOUT
from infra.tracking import tables
from infra.tracking.tables import RecordedRun

NOTEBOOKS = sorted((CHECKOUT / "notebooks").glob("*.ipynb"))


def test_all_of_them_are_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare_engines", "compare_runs", "inspect_step", "quickstart"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs_and_defines_no_logic(path: object) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    for cell in cells:
        logic = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.While, ast.Try)
        assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, logic)]
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1


def drawn(monkeypatch: pytest.MonkeyPatch, runs: list[RecordedRun], rows: list[dict[str, object]]) -> list[Figure]:
    """The figures of compare_runs for these runs and values."""
    metrics = pd.DataFrame(rows, columns=["run", "variant", "reward", "metric", "step", "value"])
    monkeypatch.setattr(tables, "recorded_runs", lambda *_, **__: runs)
    monkeypatch.setattr(tables, "part_metrics", lambda _: sorted({name for name in metrics["metric"] if name.startswith(PARTS)}))
    monkeypatch.setattr(tables, "metrics_of", lambda *_: metrics)
    names: dict[str, object] = {}
    for cell in nbformat.read(CHECKOUT / "notebooks/compare_runs.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "compare_runs", "exec"), names)
    figures = [plt.figure(number) for number in plt.get_fignums()]
    for figure in figures:
        figure.canvas.draw()
    plt.close("all")
    return figures


def colors_in(figure: Figure) -> dict[str, set[object]]:
    """Variant -> colours of its lines."""
    colors: dict[str, set[object]] = {}
    for axis in figure.axes:
        for line in axis.lines:
            colors.setdefault(str(line.get_label()), set()).add(to_hex(line.get_color()))
    return colors


def legend_of(figure: Figure) -> dict[str, str]:
    """Text -> colour."""
    (legend,) = figure.legends
    return {text.get_text(): to_hex(line.get_color()) for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)}


def values(run: str, metric: str, steps: int, *, reward: str = "a", scale: float = 1.0) -> list[dict[str, object]]:
    about = {"run": run, "variant": f"learning_rate {run[0]}", "reward": reward, "metric": metric}
    return [about | {"step": step, "value": scale * step} for step in range(steps)]


def test_a_variant_has_one_colour_in_all_panels_and_in_the_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some panels lack some variants: of three runs only the last one was evaluated."""
    runs = [RecordedRun(name, name, {"trainer.learning_rate": name}, {}) for name in ("a", "b", "c")]
    rows = [row for run in runs for row in values(run.name, "reward/mean", 3)]
    rows += values("c", "eval/pass_at_1", 3) + values("a", "time/train_s", 3) + values("a", "memory/training_gib", 3)
    curves, bars = drawn(monkeypatch, runs, rows)
    colors = colors_in(curves)
    assert all(len(found) == 1 for found in colors.values()) and len(set().union(*colors.values())) == 3
    assert legend_of(curves) == {f"{variant} (1 run)": next(iter(found)) for variant, found in colors.items()}
    labels = {label.get_text(): to_hex(label.get_color()) for label in bars.axes[0].get_yticklabels()}
    assert labels == {variant: next(iter(found)) for variant, found in colors.items()}


def test_runs_of_different_lengths_and_rewards_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [RecordedRun(name, name, {"trainer.learning_rate": name[0], "seed": name[1]}, {}) for name in ("a0", "a1", "b0")]
    rows = values("a0", "reward/mean", 9) + values("a1", "reward/mean", 3)
    rows += values("b0", "reward/mean", 5, reward="b", scale=100.0) + values("b0", f"{PARTS}right/mean", 5)
    rows += values("a0", "train/entropy", 9)
    curves, bars = drawn(monkeypatch, runs, rows)
    panels = {axis.get_title(): axis for axis in curves.axes if axis.get_visible()}
    assert list(panels) == ["reward/mean, a", "reward/mean, b", "train/entropy", "reward_parts/right/mean"]
    assert panels["reward/mean, a"].get_ylim()[1] < 10, "the scale of another reward"
    lengths = sorted(len(line.get_xdata()) for line in panels["reward/mean, a"].lines)
    assert lengths == [3, 3, 9], "two runs, and their mean at the steps that both have"
    assert set(legend_of(curves)) == {"learning_rate a (2 runs)", "learning_rate b (1 run)"}
    assert not [axis for axis in bars.axes if axis.get_visible()], "nothing was measured"
