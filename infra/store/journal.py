"""A journal of results that are collected one by one, so that the next attempt after a crash makes only the missing ones.

    <digest> {"fence": {...}}           the first line holds the inputs key: what decides the results
    <digest> {...}                      then a line for each result, in the order in which they were finished

Each line carries the digest of its content: a line cut off by a crash is detected and dropped. A journal with another inputs key is
quarantined, not used. Lines reach the operating system as they are written, so they outlive this process. They reach the disk every
second, so a power cut costs a second. Only checked results belong here: JSON has no NaN.
"""

import base64
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Self

import orjson

from infra.store.files import sync, write

log = logging.getLogger(__name__)

SYNC_EVERY_S = 1.0
NUM_DIGEST_LETTERS = 16


class LineJournal:
    """A context manager. A subclass takes what earlier attempts left in `_recover`."""

    decided_by: ClassVar[str] = "rollout"
    """What the inputs key stands for, and what the lines are; for the warning that a journal of another one is not used."""
    results: ClassVar[str] = "samples"

    def __init__(self, path: Path, fence: dict[str, str]) -> None:
        self.path, self.fence = path, fence
        self._stream: BinaryIO | None = None
        self._synced_at = 0.0

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        """Take the results of earlier attempts; return those that stay in the file."""
        raise NotImplementedError

    def _left_out(self, lines: Sequence[dict[str, Any]]) -> None:
        """Warn of effects that results of another inputs key have had: they are not used, and may be made again. By default they have none."""

    def __enter__(self) -> Self:
        lines = _whole_lines(self.path)
        if lines and lines[0] != {"fence": self.fence}:
            self._move(f"{self.path} belongs to another {self.decided_by}")
            self._left_out(lines[1:])
            lines = []
        # Rewritten: appending after a line that was cut off would spoil the next line too. Without results, the sync can wait for the first one.
        self._rewrite(self._recover(lines[1:]))
        self._stream = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            with self._stream:
                os.fsync(self._stream.fileno())
            self._stream = None

    def _rewrite(self, results: Iterable[object], *, syncs: bool = False) -> None:
        kept = [_line(content) for content in results]
        write(self.path, b"".join([_line({"fence": self.fence}), *kept]), syncs=syncs or bool(kept))

    def write(self, content: object, *, syncs: bool = False) -> None:
        """Add the line of a result.

        syncs: Whether it is on the disk when this returns, and not a second later at the latest.
        """
        assert self._stream is not None, "the journal is not open"
        self._append(_line(content))
        if syncs or time.monotonic() - self._synced_at >= SYNC_EVERY_S:
            os.fsync(self._stream.fileno())
            if not self._synced_at:
                sync(self.path.parent)  # the name of the file
            self._synced_at = time.monotonic()

    def _append(self, line: bytes) -> None:
        """Raises OSError if it cannot be written, as on a full disk: nothing of it stays, which would spoil the next line too."""
        assert self._stream is not None
        begin, rest = self._stream.seek(0, os.SEEK_END), line
        try:
            while rest:  # a disk takes a part of it, and only then says that it is full
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            self._stream.truncate(begin)
            raise OSError(error.errno, f"{error.strerror}: {len(line)} bytes for {self.path}") from error

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        sync(self.path.parent)

    def _move(self, reason: str) -> None:
        taken = len(list(self.path.parent.glob(f"{self.path.name}.aside-*")))
        target = self.path.rename(self.path.with_name(f"{self.path.name}.aside-{taken}"))
        sync(self.path.parent)
        log.warning("%s: it is set aside as %s, its %s are not used", reason, target, self.results)


class GrowingJournal:
    """Reads a journal that another thread or process writes, or will write."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._begin = path, 0, 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the lines that were added since the last call; all of them where the file is another one. The fence is not among them."""
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return []
        with stream:
            if (inode := os.fstat(stream.fileno()).st_ino) != self._inode:
                self._inode, self._begin = inode, 0
            stream.seek(self._begin)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]  # the rest is being written
        self._begin += len(whole)
        found = [_content(line) for line in whole.splitlines(keepends=True)]
        return [content for content in found if content is not None and "fence" not in content]


def fence_of(path: Path) -> dict[str, Any]:
    """Return the inputs key of a journal; empty where there is no journal, or its first line is damaged."""
    with suppress(FileNotFoundError), path.open("rb") as stream:
        return dict((_content(stream.readline()) or {}).get("fence", {}))
    return {}


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read the intact lines. Damaged lines are left out. Without its first line a journal is not used."""
    if not path.exists():
        return []
    found = [_content(line) for line in path.read_bytes().splitlines(keepends=True)]
    if found and found[0] is None:
        return [{"fence": "unreadable"}]
    whole = [content for content in found if content is not None]
    if len(whole) < len(found):
        log.warning("%s: %d of %d lines are cut off or changed and are dropped", path, len(found) - len(whole), len(found))
    return whole


# Perf: check and journal of 512 samples 2.09 -> 0.09 s of CPU time, by orjson instead of asdict and json (docs/results/step-tail.md).
def _line(content: object) -> bytes:
    data = orjson.dumps(content, default=_in_base64)
    return _digest(data) + b" " + data + b"\n"


def _in_base64(value: object) -> str:
    """Convert bytes, which JSON has not."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a journal holds no {type(value).__name__}")


def _content(line: bytes) -> dict[str, Any] | None:
    digest, _, data = line.partition(b" ")
    if not data.endswith(b"\n") or digest != _digest(data[:-1]):
        return None
    content: dict[str, Any] = orjson.loads(data)
    return content


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:NUM_DIGEST_LETTERS].encode()
