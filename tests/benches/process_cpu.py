"""CPU seconds of a command with all its descendants, those that it left behind included: servers that outlive it, too."""

import ctypes
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36
TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    pid: int
    parent: int
    command: str
    seconds: float
    """CPU seconds of its own and of children that it waited for."""


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends: none leaves the tree."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Tree:
    """All descendants of this process; the dead count with what they had used when they ended."""

    def __init__(self) -> None:
        adopt_orphans()
        self._dead: Counter[str] = Counter()
        self._commands: dict[int, str] = {}

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: Path, cwd: Path) -> int:
        """Start a command; gives its pid."""
        with output.open("ab") as file:
            return subprocess.Popen(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file).pid

    def ended(self) -> dict[int, int]:
        """Wait for children that have ended; gives their exit codes by pid."""
        codes: dict[int, int] = {}
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return codes
            if not pid:
                return codes
            codes[pid] = os.waitstatus_to_exitcode(status)
            self._dead[self._commands.get(pid, "short-lived")] += usage.ru_utime + usage.ru_stime  # type: ignore[assignment]

    def by_command(self) -> Counter[str]:
        """CPU seconds since the start by command line."""
        self.ended()
        seconds = Counter(self._dead)
        for process in descendants():
            self._commands[process.pid] = process.command
            seconds[process.command] += process.seconds  # type: ignore[assignment]
        return seconds

    def total(self) -> float:
        return float(sum(self.by_command().values()))


def descendants() -> list[Process]:
    every = [process for entry in Path("/proc").iterdir() if entry.name.isdigit() and (process := _read(entry))]
    ours, size = {os.getpid()}, 0
    while size != len(ours):
        size = len(ours)
        ours |= {process.pid for process in every if process.parent in ours}
    return [process for process in every if process.pid in ours and process.pid != os.getpid()]


def _read(entry: Path) -> Process | None:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] == "Z":
        command = ""
    return Process(int(entry.name), int(fields[1]), command, sum(map(int, fields[11:15])) / TICKS)
