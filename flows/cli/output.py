"""What a command prints: a reader that has gone away, a closed terminal and a full disk end no work, and each character can be printed."""

import errno
import io
import os
import sys
from typing import TextIO

READER_GONE = (errno.EPIPE, errno.EIO)
"""Of a pipe, as of `ratchet runs | head`, and of a terminal that was closed."""


class Output(io.TextIOWrapper):
    """Stdout or stderr. From the first line on that cannot be written, what is printed is dropped."""

    def __init__(self, stream: TextIO) -> None:
        encoding, how = stream.encoding, {name: getattr(stream, name, False) for name in ("line_buffering", "write_through")}
        super().__init__(stream.detach(), encoding=encoding, errors="backslashreplace", **how)  # type: ignore[attr-defined, arg-type]
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        self.failure = self.failure or error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def install() -> None:
    """Have lines that cannot be printed end no work."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by >&-; the next file that is opened would take its number
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            stream = os.fdopen(number, "w", closefd=False)
        output = Output(stream)
        setattr(sys, name, output)
        setattr(sys, f"__{name}__", output)


def failure() -> str:
    """Why what was printed is not whole; empty where it is, or where its reader has gone away, as `head` does."""
    sys.stdout.flush()
    found = sys.stdout.failure if isinstance(sys.stdout, Output) else None
    return "" if found is None or found.errno in READER_GONE else str(found.strerror)
