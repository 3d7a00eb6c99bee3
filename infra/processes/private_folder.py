"""Folders shared by several processes of one user, which no other user may change. Files in them are opened without following links."""

import os
import stat
from pathlib import Path
from typing import IO

from infra.store.files import PRIVATE

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(ValueError):
    """A folder or file that another user made, or could have changed."""


def make(folder: Path, *, checks_parents: bool) -> None:
    """Make a folder of this user with mode 0700, or check an existing one.

    checks_parents: Also check that no other user but root can replace one of the folders above it.

    Raises:
        NotPrivate: if it is a link or not a folder, belongs to another user, or is writable for others; names the level.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if checks_parents:
        for level in sorted({*folder.absolute().parents, *folder.parent.resolve().parents, folder.parent.resolve()}):
            _check_parent(level)
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate(f"{folder} is a link or no folder: take it away")
    if found.st_uid != os.getuid():
        raise NotPrivate(f"{folder} belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & OTHERS_WRITE:
        raise NotPrivate(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}, so other users can put files there: "
            f"see that all files in it are yours, then `chmod 700 {folder}`"
        )


def _check_parent(level: Path) -> None:
    found = level.lstat()
    if found.st_uid not in (0, os.getuid()):
        raise NotPrivate(f"{level} belongs to user {found.st_uid}, who could replace what lies in it")
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise NotPrivate(f"{level} has mode {stat.S_IMODE(found.st_mode):04o}: every user could replace what lies in it")


def open_own(path: Path, flags: int = os.O_RDONLY) -> IO[str]:
    """Open a regular file of this user without following a link. flags: As for os.open.

    Raises:
        FileNotFoundError: if it does not exist.
        NotPrivate: if it is a link, not a regular file, or belongs to another user.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPrivate(f"{path} cannot be opened as a file of this user ({error.strerror}): take it away") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise NotPrivate(f"{path} is no regular file of user {os.getuid()}: take it away")
    return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r")


def is_at(stream: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.lstat())
    except FileNotFoundError:
        return False
