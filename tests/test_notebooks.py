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
