"""No module reads the settings of the machine when it is imported: a wrong variable would be a traceback from an import."""

import ast
from collections.abc import Iterator

import pytest

from infra.settings import CHECKOUT

PACKAGES = ("flows", "tasks", "infra")


def calls_at_import(node: ast.AST) -> Iterator[int]:
    """Line numbers of the calls of `settings` that an import of the module makes: in default values and decorators, not in functions' bodies."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            parts: list[ast.AST] = [*node.decorator_list, node.args]
        case ast.Lambda():
            parts = [node.args]
        case _:
            parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) and "settings" in (getattr(node.func, "id", None), getattr(node.func, "attr", None)):
        yield node.lineno
    for part in parts:
        yield from calls_at_import(part)


def test_no_module_reads_the_settings_at_its_import() -> None:
    found = {
        f"{path.relative_to(CHECKOUT)}:{line}"
        for package in PACKAGES
        for path in (CHECKOUT / package).rglob("*.py")
        for line in calls_at_import(ast.parse(path.read_text()))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("folder = settings().workspace", True),
        ("@flow(result_storage=settings().results)\ndef run(): ...", True),
        ("def run(folder=settings().workspace): ...", True),
        ("get = lambda folder=machine.settings().workspace: folder", True),
        ("class Run:\n    folder = settings().workspace", True),
        ("if True:\n    settings()", True),
        ("def run():\n    return settings().workspace", False),
        ("get = lambda: settings().workspace", False),
        ("class Run:\n    def folder(self):\n        return settings()", False),
    ],
)
def test_what_an_import_calls_is_told_from_what_it_only_defines(source: str, is_found: bool) -> None:
    assert bool(list(calls_at_import(ast.parse(source)))) is is_found
