"""Import a reward in the worker that serves it: a function of a file with the modules of its folder, or of an installed module.

A worker serves one reward, so nothing of another file's can be mixed up with it.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from infra.rewards.built_in import PLACES
from infra.rewards.outcome import place, said
from infra.rewards.signatures import Form, form_of


class LoadedReward(NamedTuple):
    function: Callable[..., Any]
    form: Form


def load(name: str) -> LoadedReward:
    """Import a reward, and set up the model that it may hold. Raises ValueError, in one line, for one that cannot be used."""
    name = PLACES.get(name, name)
    return _checked(name, import_member(name))


def import_member(name: str, what: str = "reward") -> Any:  # Any: a user's function or class
    """Import a function or class of a user's file, or of an installed module.

    what: What it is, as an error says it.

    Raises:
        ValueError: in one line, if that fails.
    """
    path, _, function = name.rpartition(":")
    file = Path(path) if path.endswith(".py") else None
    if file:
        sys.path.insert(0, str(import_folder(file)))
    module = _imported(name, file, what)
    return _member(module, function if file else name.rpartition(".")[2], name, what)


def _imported(name: str, file: Path | None, what: str) -> ModuleType:
    try:
        return _module_of(file) if file else importlib.import_module(name.rpartition(".")[0])
    except BaseException as error:
        text = str(error) if isinstance(error, ImportError) else said(error)
        raise ValueError(f"{what} {name!r} cannot be imported: {text}{place(error)}") from error


def _module_of(path: Path) -> ModuleType:
    """Import a reward's file. Raises ImportError if its package's name is already that of another module."""
    name = module_name(path)
    if not is_in_package(path):
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    module = importlib.import_module(name)
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise ImportError(f"module {name} is already imported from {module.__file__}: rename the file's package")
    return module


def _member(module: ModuleType, function: str, name: str, what: str) -> object:
    found = getattr(module, function, None)
    if found is None:
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        own = [key for key, value in public.items() if inspect.isfunction(value) or _is_class_of(module, value)]
        has = f"functions and classes there: {', '.join(own)}" if own else "there is no function or class in it"
        near = difflib.get_close_matches(function, own, n=1)
        raise ValueError(f"{what} {name!r} does not exist{f'; the nearest is {near[0]}' if near else ''}; {has}")
    return found


def _is_class_of(module: ModuleType, value: object) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__


def _checked(name: str, found: object) -> LoadedReward:
    """Return a function, an object that can be called, or an instance of a class after its setup()."""
    if inspect.isclass(found):
        found = _set_up(name, found)
    if not callable(found):
        raise ValueError(f"reward {name!r} is no function but a {type(found).__name__}")
    try:
        return LoadedReward(found, form_of(name, found))
    except TypeError as error:
        raise ValueError(f"reward {name!r} has parameters that cannot be read: {error}") from error


def _set_up(name: str, kind: type) -> object:
    if not callable(getattr(kind, "__call__", None)) or "__call__" not in dir(kind):  # noqa: B004  # of its instances
        raise ValueError(f"reward {name!r} is a class without __call__: give it one, with the parameters of a reward")
    try:
        made = kind()
        if setup := getattr(made, "setup", None):
            setup()
    except BaseException as error:
        raise ValueError(f"reward {name!r} cannot be set up: {said(error)}{place(error)}") from error
    return made


def module_name(path: Path) -> str:
    """Return the name as which a file is imported: by its path, or that in the package to which it belongs."""
    if is_in_package(path):
        parts = path.relative_to(import_folder(path)).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"


def is_in_package(path: Path) -> bool:
    """Whether a file is a module of a package."""
    return (path.parent / "__init__.py").exists()


def import_folder(path: Path) -> Path:
    """Return the folder from which a file imports: its own, or that of the package to which it belongs."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder
