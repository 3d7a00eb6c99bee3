"""The kernel's view of a process: when it started, whether it is alive, what its environment holds. See proc(5)."""

import time
from functools import cache
from pathlib import Path

DEAD = ("Z", "X")
WITHOUT_ENVIRONMENT = 0x00200000 | 0x00000004
"""Flags of a process, PF_KTHREAD and PF_EXITING: a kernel thread, or a process that is exiting, which can take seconds."""
LOOK_AGAIN_S = 0.001
EXEC_S = 1.0
"""Longest duration of an exec, even on a busy machine."""


def start_and_state(pid: int) -> tuple[int, str]:
    """Return the start of a process, in clock ticks since boot, and its state.

    Raises:
        ProcessLookupError: if there is no such process.
    """
    fields = _stat(pid)
    return int(fields[19]), fields[0]


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def has_variable(pid: int, variable: str) -> bool:
    """Whether `NAME=value` is in the environment of a process. False if it cannot be read."""
    deadline = time.monotonic() + EXEC_S
    try:
        while not (found := _environ(pid)) and not _has_none(pid) and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_S)
    except OSError:  # it is gone, or belongs to another user
        return False
    return variable.encode() in found.split(b"\0")


def _environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _has_none(pid: int) -> bool:
    """Whether a process permanently has no environment. During an exec no process has one; its program's leftovers would be missed."""
    state, flags, *environment = _environments_place(pid)
    if state in DEAD or int(flags) & WITHOUT_ENVIRONMENT:
        return True
    begin, end = environment
    if begin != end or end == "0":
        return False
    time.sleep(LOOK_AGAIN_S)  # an exec passes through this state too: it moves on, or shows it again with other addresses
    return [*_environments_place(pid)[2:]] == environment


def _environments_place(pid: int) -> tuple[str, str, str, str]:
    """Return state, flags, and the addresses of the environment's start and end."""
    fields = _stat(pid)
    return fields[0], fields[6], fields[47], fields[48]


def _stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
