"""The digest of the code that a task runs, so that a cached result is never used for other code.

It covers a module and all modules of ours that it imports, wherever in the file the import is. Comments, docstrings and
layout do not count: the digest is over the syntax tree.
"""

import ast
import hashlib
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from infra.settings import CHECKOUT
from infra.store.check_costs import counted
from infra.store.digests import sha256_of
from infra.store.installed import is_installed

PACKAGES = ("flows", "tasks", "infra")
_PARSING = threading.Lock()
_FOREIGN: dict[str, dict[Path, str]] = {}
"""By digest of code that is not ours: the digests of its source files."""


# Perf: 0.35 s, paid once in a process (CPU, docs/history/log.md).
@cache
@counted("digests of code")
def digest(*modules: str) -> str:
    """SHA-256 over modules of ours and their imports of ours. Modules are given by name; a package stands for all its modules."""
    lines = (f"{name} {found}\n" for name, found in by_file(*modules).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def by_file(*modules: str) -> dict[str, str]:
    """Return the digests of the same files one by one, by their path in the checkout."""
    return {path.relative_to(CHECKOUT).as_posix(): digest_of_file(path) for path in sorted(_closure(modules))}


@cache
def digest_of_file(path: Path) -> str:
    """SHA-256 of a source file's syntax tree, in hex: comments, docstrings and layout do not count."""
    return _digest_now(path)


def _digest_now(path: Path) -> str:
    return hashlib.sha256(ast.dump(_without_docstrings(_parsed(path))).encode()).hexdigest()


def _parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree. Python 3.11 raises SystemError where two threads make one at a time (python/cpython issue 106905)."""
    with _PARSING:
        return ast.parse(path.read_bytes())


def digest_of_foreign(module: str, path: Path | None = None, folder: Path | None = None) -> str:
    """Return the SHA-256 over a module that is not ours. It covers its file, the files of all modules that it imports from outside the installed
    packages, and the versions of imported installed packages. Imports are read from the sources, wherever in a file they are.

    Nothing is imported.

    path: The module's file; None is where an import finds it.
    folder: Where imports look first.
    """
    importlib.invalidate_caches()
    files, packages, waiting = dict[str, Path](), set[str](), [module]
    while waiting:
        name = waiting.pop()
        given = path if name == module else None
        if name in files or (name.split(".")[0] in sys.stdlib_module_names and not given):
            continue
        if (found := given or _file_of(name, folder)) is None:
            continue
        if is_installed(found):
            packages.add(name.split(".")[0])
        else:
            files[name] = found
            package = name if found.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [*_parents(name), *(_imports_of(found, package) if found.suffix == ".py" else ())]
    digests = {name: digest_of_file(file) if file.suffix == ".py" else sha256_of(file) for name, file in sorted(files.items())}
    lines = [f"{name} {found}\n" for name, found in digests.items()]
    lines += [f"{name} {_version_of(name)}\n" for name in sorted(packages)]
    whole = hashlib.sha256("".join(lines).encode()).hexdigest()
    _FOREIGN[whole] = {files[name]: found for name, found in digests.items() if files[name].suffix == ".py"}
    return whole


def changed_since(digest: str) -> list[Path]:
    """Return the source files of a digest of digest_of_foreign that are others now. A process keeps the digests with which it began."""
    return [path for path, before in _FOREIGN.get(digest, {}).items() if not path.exists() or _digest_now(path) != before]


def _file_of(name: str, folder: Path | None) -> Path | None:
    """Return where an import would find a module, without importing anything."""
    places: Sequence[str] | None = None
    found: ModuleSpec | None = None
    for prefix in [*_parents(name), name]:
        first = [str(folder)] if folder and places is None else None
        try:
            found = (_spec_of(prefix, first) if first else None) or _spec_of(prefix, places)
        except (ImportError, ValueError, AttributeError, KeyError):  # the last of a namespace package without its parent
            return None
        if found is None or (prefix != name and found.submodule_search_locations is None):
            return None  # a name in a module that is not a module itself, or an optional import
        places = list(found.submodule_search_locations or ())
    return Path(found.origin) if found and found.origin and Path(found.origin).is_file() else None


def _spec_of(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec), None)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imports_of(path: Path, package: str) -> list[str]:
    """Return the absolute names of a file's imports. `from a import b` gives both a and a.b, which may be a module."""
    names: list[str] = []
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in names if name]


@cache
def _version_of(package: str) -> str:
    """Return the version of an installed package by its import name; empty if no distribution contains it."""
    found = importlib.metadata.packages_distributions().get(package, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(found)))


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
    """Return the files of a module of ours; none for other modules."""
    if module.split(".")[0] not in PACKAGES:
        return []
    place = CHECKOUT / module.replace(".", "/")
    if place.is_dir():
        return sorted(place.rglob("*.py")) if whole_package else [place / "__init__.py"]
    return [place.with_suffix(".py")] if place.with_suffix(".py").exists() else []


@cache
def _imports(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(_parsed(path)):
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
    """Whether it is a docstring, of a field too."""
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )
