"""The digest of the code that a piece of work runs, so that a cached result is not taken for that of other code.

It covers a module and all modules of ours that it imports, wherever in the file the import stands. Comments, docstrings and
layout do not count: the digest is over the syntax tree.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path

from infra.settings import CHECKOUT
from infra.spans import counted

PACKAGES = ("flows", "tasks", "infra")


@cache
@counted("digests of code")
def digest(*modules: str) -> str:
    """SHA-256 over modules of ours, given by name (a package stands for all its modules), and what they import of ours."""
    lines = (f"{name} {found}\n" for name, found in by_file(*modules).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def by_file(*modules: str) -> dict[str, str]:
    """The digests of the same files one by one, by their path in the checkout."""
    return {path.relative_to(CHECKOUT).as_posix(): digest_of_file(path) for path in sorted(_closure(modules))}


@cache
def digest_of_file(path: Path) -> str:
    return hashlib.sha256(ast.dump(_without_docstrings(ast.parse(path.read_bytes()))).encode()).hexdigest()


def _closure(modules: tuple[str, ...]) -> set[Path]:
    found: set[Path] = set()
    waiting = [path for name in modules for path in _files(name, whole_package=True)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [imported for name in _imports(path) for imported in _files(name, whole_package=False)]
    return found


def _files(module: str, *, whole_package: bool) -> list[Path]:
    """The files of a module of ours; none for anybody else's."""
    if module.split(".")[0] not in PACKAGES:
        return []
    place = CHECKOUT / module.replace(".", "/")
    if place.is_dir():
        return sorted(place.rglob("*.py")) if whole_package else [place / "__init__.py"]
    return [place.with_suffix(".py")] if place.with_suffix(".py").exists() else []


@cache
def _imports(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(names)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, or the sentence under a field."""
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )
