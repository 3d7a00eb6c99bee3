"""A file takes the place of another one without waiting for the disk.

Where a file replaces another one by `rename`, ext4 begins to write its content at once (`auto_da_alloc`), and waits until the disk's queue has room:
5 to 50 ms while an adapter's gigabytes are on their way (docs/results/speed.md). Two files that exchange their names (renameat2, Linux 3.15) write
nothing.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

_HERE = -100  # AT_FDCWD of <fcntl.h>
_EXCHANGE = 2  # RENAME_EXCHANGE of <stdio.h>


# Perf: 90% of notes within 0.5 ms, not 23 ms, while two files of 1.5 GB are written (2 CPU cores, docs/results/speed.md).
def replace(partial: Path, path: Path) -> None:
    """Like `partial.replace(path)`. After a power cut the file may be empty: neither content is on the disk for certain."""
    if path.is_file() and _exchange(partial, path):
        partial.unlink()
    else:
        partial.replace(path)


def _exchange(one: Path, other: Path) -> bool:
    """Whether the names were exchanged: not every file system and C library can."""
    rename = getattr(_libc(), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
