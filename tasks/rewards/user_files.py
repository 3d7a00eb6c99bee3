"""Import rewards from files of a user's own, each with the modules of its own folder.

Two files of one name in different folders are different modules, and so are the modules that they import from there.
"""

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from infra.config.tools.reward_file import RewardFile, check_file, parsed
from infra.store import code_digest


def check(file: RewardFile) -> None:
    """Raises ValueError for a path that is not absolute, and for a file that does not exist or is not valid Python."""
    if not file.path.is_absolute():
        raise ValueError(f"reward {str(file)!r} has a relative path: outside of the command line give it in full, from /")
    check_file(file.path)
    parsed(file.path)


def load(file: RewardFile) -> ModuleType:
    """Import a reward's file, once in a process, with imports as `importing_from` makes them.

    Raises:
        ImportError: if its package's name is already that of another module.
    """
    name = module_name(file.path)
    importlib.invalidate_caches()
    if not _in_package(file.path):
        return sys.modules.get(name) or _executed(name, file.path)
    module = importlib.import_module(name)
    if Path(str(module.__file__)).resolve() != file.path.resolve():
        raise ImportError(f"module {name} is already imported from {module.__file__}: rename the file's package")
    return module


def _executed(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def module_name(path: Path) -> str:
    """Return the name as which a file is imported: by its path, or that in the package to which it belongs."""
    if _in_package(path):
        parts = path.relative_to(import_folder(path)).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"


def _in_package(path: Path) -> bool:
    return (path.parent / "__init__.py").exists()


@cache
def import_folder(path: Path) -> Path:
    """Return the folder from which a file imports: its own, or that of the package to which it belongs."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def source_digest(file: RewardFile, function: Callable[..., object]) -> str:
    """Digest a file with all modules that it imports from its folder, and the module in which its function is defined."""
    name = module_name(file.path)
    with importing_from(file):
        digests = [code_digest.digest_of_foreign(name if _in_package(file.path) else "<file>", file.path)]
        if function.__module__ != name:
            digests.append(code_digest.digest_of_foreign(function.__module__))
    return " ".join(digests)


class _Imports:
    """Whose modules sys.modules has."""

    lock = threading.Lock()
    folder: Path | None = None
    own: dict[Path, dict[str, ModuleType]] = {}  # noqa: RUF012  # state of the process
    """Imported modules of the folders that are not in use."""
    shadowed: dict[str, ModuleType] = {}  # noqa: RUF012
    """Modules whose name the folder in use has too."""


@contextmanager
def importing_from(file: RewardFile | None) -> Iterator[None]:
    """Have imports find the modules beside a file first. None stands for a reward that is no file: imports as usual."""
    folder = import_folder(file.path) if file else None
    _switch_to(folder)
    if folder is None:
        yield
        return
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _switch_to(folder: Path | None) -> None:
    if folder == _Imports.folder:
        return
    with _Imports.lock:
        if left := _Imports.folder:
            _Imports.own[left] = _taken(lambda name, path: path.is_relative_to(left))
            sys.modules.update(_Imports.shadowed)
            _Imports.shadowed = {}
        if folder:
            names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
            _Imports.shadowed = _taken(lambda name, path: name.partition(".")[0] in names and not path.is_relative_to(folder))
            sys.modules.update(_Imports.own.pop(folder, {}))
        _Imports.folder = folder


def _taken(is_meant: Callable[[str, Path], bool]) -> dict[str, ModuleType]:
    """Take users' modules out of sys.modules."""
    places = {
        name: _place_of(module) for name, module in sys.modules.copy().items() if name.split(".")[0] not in code_digest.PACKAGES
    }
    return {
        name: sys.modules.pop(name)
        for name, path in places.items()
        if path and is_meant(name, path) and name != "__main__" and not code_digest.is_installed(path)
    }


def _place_of(module: ModuleType) -> Path | None:
    """Return a module's file, or the folder of a package without one. Other attributes than its own could import something."""
    own = vars(module) if isinstance(module, ModuleType) else {}
    if isinstance(file := own.get("__file__"), str):
        return Path(file)
    return next((Path(folder) for folder in own.get("__path__", ())), None)
