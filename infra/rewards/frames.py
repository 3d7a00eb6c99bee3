"""Messages over pipes: four bytes of length, then the content."""

import os
import struct

HEAD = struct.Struct("<I")
MAX_RESULT_BYTES = 2**20
"""Longest message of a worker. It runs a user's code, which may write anything to its pipe."""


def packed(content: bytes) -> bytes:
    return HEAD.pack(len(content)) + content


def write(descriptor: int, content: bytes) -> None:
    """Write one message, or several that are packed already, to a blocking pipe."""
    write_all(descriptor, packed(content))


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read(descriptor: int) -> bytes | None:
    """Read one message from a blocking pipe; None at its end."""
    head = _exactly(descriptor, HEAD.size)
    return None if head is None else _exactly(descriptor, HEAD.unpack(head)[0])


def _exactly(descriptor: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        data = os.read(descriptor, min(size, 2**20))
        if not data:
            return None
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


class Reader:
    """Cuts what comes over a pipe, in pieces of any size, into messages."""

    def __init__(self, max_bytes: int = MAX_RESULT_BYTES) -> None:
        self._buffer, self._max_bytes = bytearray(), max_bytes
        self.is_broken = False
        """Whether something came that is no message, or is too long for one. What comes after it is lost."""

    def take(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with this piece."""
        self._buffer += data
        found: list[bytes] = []
        begin = 0
        while len(self._buffer) - begin >= HEAD.size and not self.is_broken:
            (size,) = HEAD.unpack_from(self._buffer, begin)
            end = begin + HEAD.size + size
            self.is_broken = size > self._max_bytes
            if self.is_broken or end > len(self._buffer):
                break
            found.append(bytes(self._buffer[begin + HEAD.size : end]))
            begin = end
        del self._buffer[:begin]
        return found
