"""Remove the shared-memory segments that SGLang's processes leave in /dev/shm when they end.

Each server leaves a file of 16 KiB and 12 bytes (its load figures). Its name is random, so it has to be read from the running
processes.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from infra.processes import children

FOLDER = Path("/dev/shm")
NAME = re.compile(r"(sglang_loads_|sgl_shm_)[A-Za-z0-9._-]+")
"""Names of segments that SGLang makes for a single server."""


def segments_of(program: str) -> set[str]:
    """Return the names of the segments that the running processes of a program hold open."""
    names: set[str] = set()
    for process in children.members(program):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            paths = [Path(opened.path) for opened in process.open_files()]
            names |= {path.name for path in paths if path.parent == FOLDER and NAME.fullmatch(path.name)}
    return names


def remove(names: Iterable[str]) -> None:
    """Remove segments of a program that has ended. Names of another form and files of other users are left alone."""
    for name in names:
        if not NAME.fullmatch(str(name)):
            continue
        with contextlib.suppress(FileNotFoundError):
            if (path := FOLDER / name).lstat().st_uid == os.getuid():
                path.unlink()
