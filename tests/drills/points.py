"""How a process of a cell says "I am at the point", waits for the strike, and hears what is asked of it. Standard library only.

plan.json    {"point", "is_real", "replicas"}   by the drill, before anything starts
at.json      {"point", "pid"}                   by the first process that comes to the point; it waits
go                                              by the drill, after the strike; it goes on
order.json   {"target", "fault", "pid"}         by the drill, before go: faults that a process commits itself

The folder of the cell is named by DRILL_FOLDER, which every process of the cell inherits: it is also the mark by which orphans are found.
"""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any, NoReturn

MARK = "DRILL_FOLDER"
WAIT_S = 90.0
"""Longer than any strike takes; a drill that died must not leave processes waiting for ever."""


def folder() -> Path | None:
    """Of the cell that this process belongs to."""
    named = os.environ.get(MARK)
    return Path(named) if named else None


def reach(point: str) -> None:
    """Wait here if this is where the cell strikes, the first time that anybody comes here."""
    cell = folder()
    if cell is None or _read(cell / "plan.json").get("point") != point:
        return
    try:
        descriptor = os.open(cell / "at.json.partial", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, json.dumps({"point": point, "pid": os.getpid()}).encode())
    os.close(descriptor)
    (cell / "at.json.partial").rename(cell / "at.json")
    (cell / "at.json.partial").touch()  # nobody comes here first again
    deadline = time.monotonic() + WAIT_S
    while not (cell / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def wait_for(point: str) -> None:
    """Wait until another thread has come to the point, if this is where the cell strikes."""
    cell, deadline = folder(), time.monotonic() + WAIT_S
    if cell is None or _read(cell / "plan.json").get("point") != point:
        return
    while not (cell / "at.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def plan() -> dict[str, Any]:
    """Return the cell's plan; empty outside of one."""
    cell = folder()
    return _read(cell / "plan.json") if cell else {}


def num_replicas() -> int:
    """Of the cell's engine."""
    cell = folder()
    return int(str(_read(cell / "plan.json").get("replicas", 1))) if cell else 1


def ordered(target: str) -> str | None:
    """The fault that this process is to commit; orders go to one process, not to its successor."""
    cell = folder()
    order = _read(cell / "order.json") if cell else {}
    return str(order["fault"]) if (order.get("target"), order.get("pid")) == (target, os.getpid()) else None


def run_out_of_memory() -> NoReturn:
    """Ask for more than this process may have, until the system says no. Raises MemoryError.

    The limit goes with the error: under it no thread could be started any more, and what a system does to a process that stays out of
    memory is SIGKILL, which has cells of its own.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**30, before[1]))
    hoard = []
    try:
        while True:
            hoard.append(bytearray(2**26))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _read(path: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return found
