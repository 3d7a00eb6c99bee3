"""Names of tasksets of verifiers: an importable one, or the path of a package or file."""

import os
import re
from pathlib import Path

SOURCE = "verifiers:"
"""How a data source begins that is a taskset."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def check_name(taskset: str) -> None:
    """Raises ValueError for a name that is neither importable nor a path."""
    if path_of(taskset) is None and not NAME.fullmatch(taskset):
        raise ValueError(
            f"taskset {taskset!r} is neither the name of an installed one, such as my_taskset, nor a path, such as /home/me/my_taskset"
        )


def path_of(taskset: str) -> Path | None:
    """The path of a taskset that is given by its path; None for a name."""
    return Path(taskset) if taskset.startswith("/") else None


def absolute(taskset: str, folder: Path) -> str:
    """Return a taskset's name, with its whole path if it is a path: it has a slash, or is in the folder where the command runs."""
    path = Path(os.path.expanduser(taskset))
    return str(folder / path) if "/" in taskset and taskset else taskset


def taskset_of(source: str) -> str | None:
    """The taskset that a data source names; None for another source."""
    return source.removeprefix(SOURCE) if source.startswith(SOURCE) else None
