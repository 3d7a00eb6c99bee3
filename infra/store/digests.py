"""SHA-256 of files. Digests of large files are cached for as long as the kernel reports no write to them.

Device, inode, size and the times of the last change identify the content, as in git's index. So a file keeps its digest when it or a
folder above it is renamed. The cache belongs to this process, and small files are always read.
"""

import hashlib
import os
import threading
import time
from io import BufferedReader
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.store.check_costs import counted

LARGE_BYTES = 2**20
SETTLED_S = 0.1
"""Files written less than this many seconds ago are not cached. The kernel's clock for these times is coarse, up to 10 ms: two writes within
one tick look like one."""
MAX_REMEMBERED = 4096


class Stamp(BaseModel):
    """Identifies a file's state. A different stamp means that the file or its name was changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


class Digest(BaseModel):
    """The SHA-256 of a file's content, as of a stamp."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    stamp: Stamp


_remembered: dict[Stamp, str] = {}
_lock = threading.Lock()


# Perf: a step hashed 483 MB five times, at 1.3 to 1.4 GB/s a core (7B, H200, docs/history/log.md).
@counted("digests")
def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex. That of a file which has not changed since is remembered."""
    stamp, looked_at = stamp_of(path), time.time_ns()
    if known := _remembered.get(stamp):
        return known
    sha256 = sha256_in(path.open("rb"))
    is_settled = looked_at - max(stamp.modified_ns, stamp.changed_ns) > SETTLED_S * 1e9
    if is_settled and stamp_of(path) == stamp:
        _remember(Digest(sha256=sha256, stamp=stamp))
    return sha256


def sha256_in(file: BufferedReader) -> str:
    """Digest a file from its beginning, and close it."""
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(path: Path) -> Stamp:
    """Return what changes with a file's content. Raises FileNotFoundError."""
    found = os.stat(path)
    return Stamp(
        device=found.st_dev,
        inode=found.st_ino,
        num_bytes=found.st_size,
        modified_ns=found.st_mtime_ns,
        changed_ns=found.st_ctime_ns,
    )


def trust_digest(path: Path, digest: Digest) -> Digest:
    """Use the digest reported by a program of ours that has just written the file, if the file was not written to since."""
    if path.exists() and stamp_of(path) == digest.stamp:
        _remember(digest)
    return digest


def _remember(digest: Digest) -> None:
    if digest.stamp.num_bytes < LARGE_BYTES:
        return
    with _lock:  # files are read concurrently, and a rollout may run during a commit
        while len(_remembered) >= MAX_REMEMBERED:
            _remembered.pop(next(iter(_remembered)))
        _remembered[digest.stamp] = digest.sha256
