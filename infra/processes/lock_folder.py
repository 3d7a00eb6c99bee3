"""The folder shared by all users of the same GPUs, and the GPU lock in it, which one of them holds.

gpu.lock           held (flock) by the process that makes steps; the kernel frees it when that process ends, however it ends
holder.json        who the holder is
programs/<id>      one for each started engine or trainer, locked by a descriptor that the program inherits
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from infra.machine import devices
from infra.processes import private_folder
from infra.settings import settings
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

POLL_S = 0.2
REPEAT_S = 60.0
"""Seconds between two log lines of a waiter that name the holder."""

held: ContextVar[IO[str] | None] = ContextVar("held", default=None)
"""The lock's file, if this context holds the lock."""


class LockReplaced(RuntimeError):
    """The lock's file was replaced or removed while it was held: there may be another holder."""


def folder() -> Path:
    """Return the folder of all workers that share the same GPUs."""
    if settings().lock_folder:
        return settings().lock_folder or Path()
    if devices.device() == "cpu":
        return Workspace.here().locks  # nothing to share: each workspace has its own
    return Path(f"/tmp/ratchet-{os.getuid()}")  # one for the host, even if TMPDIR is set


def lock_path() -> Path:
    return folder() / "gpu.lock"


def holder_path() -> Path:
    return folder() / "holder.json"


def programs() -> Path:
    """Folder."""
    return folder() / "programs"


def make() -> None:
    """Make the lock folder. Raises ValueError if it cannot be made, or if another user made it or could change it."""
    try:
        # A folder in the workspace is as safe as the workspace: the folders above it are the user's choice.
        private_folder.make(folder(), checks_parents=not folder().is_relative_to(settings().workspace))
        private_folder.make(programs(), checks_parents=False)
    except private_folder.NotPrivate as error:
        raise ValueError(
            f"lock folder {folder()} is not safe: {error}; or set RATCHET_LOCK_FOLDER to a folder of yours"
        ) from error
    except OSError as error:
        raise ValueError(
            f"lock folder {folder()} cannot be made: {error.strerror}; set RATCHET_LOCK_FOLDER to a folder of yours"
        ) from error


def check_held() -> None:
    """Check the lock before a program is started. Raises LockReplaced if its file is no longer the one that we hold."""
    stream = held.get()
    if stream is None:
        return
    if not private_folder.is_at(stream, lock_path()):
        raise LockReplaced(
            f"{lock_path()} was replaced or removed while this process held it, so another one may use the same GPUs: "
            "see that no other run is at work, then give the same command again"
        )
    os.utime(stream.fileno())  # so that cleaners of old files in /tmp leave it alone


def try_to_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait(is_over: Callable[[], bool], message: Callable[[], str]) -> bool:
    """Wait until is_over. Returns whether there was any wait."""
    said = -REPEAT_S
    while not is_over():
        if (now := time.monotonic()) - said >= REPEAT_S:
            log.warning("%s", message())
            said = now
        time.sleep(POLL_S)
    return said >= 0
