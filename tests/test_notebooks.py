"""What can be said of the notebooks without running them; tests/test_end_to_end.py runs them on real runs."""

import ast

import nbformat
import pytest

from infra.settings import CHECKOUT

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


def test_a_variant_has_one_colour_in_all_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some panels lack some variants: of three runs only the last one was evaluated."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    from infra.tracking import tables

    runs = [tables.RecordedRun(name, name, {"trainer.learning_rate": name}, {}) for name in ("a", "b", "c")]
    shown = [(run.name, "reward/mean") for run in runs] + [
        ("c", "eval/pass_at_1"),
        ("a", "time/train_s"),
        ("a", "memory/training_gib"),
    ]
    rows = [
        {"run": run, "variant": f"learning_rate {run}", "metric": metric, "step": step, "value": float(step)}
        for run, metric in shown
        for step in range(3)
    ]
    monkeypatch.setattr(tables, "recorded_runs", lambda *_, **__: runs)
    monkeypatch.setattr(tables, "metrics_of", lambda *_: pd.DataFrame(rows))
    names: dict[str, object] = {}
    for cell in nbformat.read(CHECKOUT / "notebooks/compare_runs.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "compare_runs", "exec"), names)
    curves = plt.figure(1)
    colors: dict[str, set[object]] = {}
    for axis in curves.axes:
        for line in axis.lines:
            colors.setdefault(str(line.get_label()).partition(" (")[0], set()).add(line.get_color())
    plt.close("all")
    assert colors.keys() == {f"learning_rate {run.name}" for run in runs}
    assert all(len(found) == 1 for found in colors.values()) and len(set().union(*colors.values())) == 3
