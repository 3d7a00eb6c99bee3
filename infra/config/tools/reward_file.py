"""Names of rewards that are functions in a user's file: `/home/me/mine.py:score`. In a configuration the path is absolute."""

import ast
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

FIELD = "reward.name"
FUNCTIONS = "reward.functions"
ENVIRONMENT, COMMAND, MCP = "environment.name", "environment.command", "environment.mcp"
KEYWORDS = frozenset({"question", "completion", "answer"})
PACKAGES = ("flows", "tasks", "infra")
"""Packages of Ratchet. A dotted name in them means the module, wherever the command runs."""


class RewardFile(NamedTuple):
    """A function in a file."""

    path: Path
    function: str

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the file and function of a reward's name; None for another kind of name."""
        path, _, function = name.rpartition(":")
        return cls(Path(path), function) if path.endswith(".py") else None

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"


def absolute(name: str, folder: Path, field: str = FIELD) -> str:
    """Return a reward's or an environment's name with the absolute path of its file; other names unchanged.

    name: `mine.py:score`, `mine.py` with a single reward in it, or `mine.score` where the folder holds mine.py or the package mine.
    folder: Where relative paths start.
    field: Whose value it is.

    Raises:
        ValueError: for a file without a function's name that cannot be read or has not exactly one reward; for any such environment.
    """
    if file := RewardFile.parse(name):
        return str(RewardFile(_resolved(file.path, folder), file.function))
    if name.endswith(".py"):
        path = _resolved(Path(name), folder)
        if field == ENVIRONMENT:
            raise ValueError(f"{field} {name!r} names no class or function: {_example(name, path)}")
        return str(RewardFile(path, _only_reward(name, path)))
    module, _, function = name.rpartition(".")
    if module and all(part.isidentifier() for part in name.split(".")) and module.split(".")[0] not in PACKAGES:
        place = folder / module.replace(".", "/")
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                return str(RewardFile(_resolved(path, folder), function))
    return name


def absolute_functions(functions: Sequence[Any], folder: Path) -> list[Any]:
    """Do the same for the names in the value of `reward.functions`. What is no function with a name stays as it is."""
    return [
        each | {"name": absolute(each["name"], folder)} if isinstance(each, dict) and isinstance(each.get("name"), str) else each
        for each in functions
    ]


def absolute_in_sweep(words: str, folder: Path) -> str:
    """Do the same for the values in `reward.name=mine.py:score,mine.py:other`, or of an environment. Another field's words and a JSON list stay as
    they are."""
    field, _, values = words.partition("=")
    if field not in (FIELD, ENVIRONMENT) or values.lstrip().startswith("["):
        return words
    return f"{field}={','.join(absolute(value.strip(), folder, field) for value in values.split(','))}"


def absolute_command(words: Sequence[str], folder: Path) -> list[str]:
    """Return a program's words with the absolute paths of the files among them. A first word without a folder is found in PATH."""
    return [
        str(_resolved(Path(word), folder)) if (position or "/" in word) and (folder / word).is_file() else word
        for position, word in enumerate(words)
    ]


def absolute_server(text: str, folder: Path) -> str:
    """Do the same for the command of an MCP server; an address, and what is no command, stay as they are."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    changed = absolute_command(words, folder)
    return text if changed == words else shlex.join(changed)


def _resolved(path: Path, folder: Path) -> Path:
    return (folder / os.path.expanduser(path)).resolve()


def _only_reward(name: str, path: Path) -> str:
    functions = _functions_of(path)
    fitting = [function for function, arguments in functions.items() if arguments >= KEYWORDS]
    if len(fitting) == 1:
        return fitting[0]
    found = f"it has {', '.join(functions)}" if functions else "it has no function"
    example = (fitting or list(functions) or ["score"])[0]
    raise ValueError(f"{FIELD} {name!r} names no function, and {found}: give one, such as {name}:{example}")


def _example(name: str, path: Path) -> str:
    """Say what a file's environment may be called."""
    check_file(path, "environment")
    kinds = (ast.ClassDef, ast.AsyncFunctionDef)
    found = [node.name for node in parsed(path, "environment").body if isinstance(node, kinds) and not node.name.startswith("_")]
    has = f"it has {', '.join(found)}" if found else "it has no class and no async function"
    return f"{has}; give one, such as {name}:{(found or ['Game'])[0]}"


def _functions_of(path: Path) -> dict[str, set[str]]:
    """Return the public functions of a file with the names of their arguments."""
    check_file(path)
    defined = [node for node in parsed(path).body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {node.name: {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} for node in defined}


def parsed(path: Path, what: str = "reward") -> ast.Module:
    """Raises ValueError with the line of a syntax error. what: as the error calls the file."""
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise ValueError(f"{what} file {path}, line {error.lineno}, is not valid Python: {error.msg}") from None
    except ValueError as error:  # null bytes
        raise ValueError(f"{what} file {path} is not valid Python: {error}") from None


def check_file(path: Path, what: str = "reward") -> None:
    """Raises ValueError for a file that does not exist; names the one that is nearest. what: as the error calls the file."""
    if path.is_file():
        return
    import difflib

    there = sorted(found.name for found in path.parent.glob("*.py")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.stem, [name.removesuffix(".py") for name in there], n=1)
    if not path.parent.is_dir():
        why = f"the folder {path.parent} does not exist"
    elif near:
        why = f"the nearest is {near[0]}.py"
    else:
        why = f"{path.parent} has {', '.join(there[:5]) or 'no Python file'}"
    raise ValueError(f"{what} file {path} does not exist; {why}")
