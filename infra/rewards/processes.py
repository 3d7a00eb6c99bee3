"""The pool's workers as processes: forked, watched over pipes, ended with all that they started."""

import contextlib
import os
import re
import signal
import time
from collections import deque
from pathlib import Path

from infra.rewards import frames
from infra.rewards.outcome import is_users
from infra.rewards.worker import SHOW_PLACE, PipeEnds, Spec, run

READ_BYTES = 2**18
"""More than a pipe holds."""
PLACE_WAIT_S = 0.05
FRAME = re.compile(rb'File "([^"]+)", line (\d+)')


class Worker:
    """A worker as the pool sees it."""

    def __init__(self, spec: Spec) -> None:
        pipes = [os.pipe() for _ in PipeEnds._fields]
        (take, self.requests), (self.results, give), (self.output, show), (self.places, where) = pipes
        theirs, pool = PipeEnds(take, give, show, where), os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            run(spec, theirs, pool)
        for end in theirs:
            os.close(end)
        for end in self.ends:
            os.set_blocking(end, False)
        self.exit = os.pidfd_open(self.pid)
        """Becomes readable when the process ends, also where a child of its holds its pipes open."""
        self.reader = frames.Reader()
        self.outgoing = bytearray()
        self.pending: deque[int] = deque()
        """Indices of the samples that it has and that have no outcome yet, in their order."""
        self.since = time.monotonic()
        """When it last got or finished a sample."""
        self.is_ready = False
        self.chunk, self.given_at = 1, self.since
        """Samples that it gets at a time, and when it got the latest ones."""

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.requests, self.results, self.output, self.places)

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.pending

    def flush(self) -> None:
        """Write as much of what it is to get as its pipe takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.outgoing:
                del self.outgoing[: os.write(self.requests, memoryview(self.outgoing)[:READ_BYTES].tobytes())]

    def read(self, end: int) -> bytes | None:
        """Return what a pipe holds at the moment, nothing where it holds nothing; None at its end."""
        try:
            return os.read(end, READ_BYTES) or None
        except BlockingIOError:
            return b""

    def place(self) -> str:
        """Ask a worker that gives no result where in the user's code it is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, SHOW_PLACE)
        time.sleep(PLACE_WAIT_S)
        return self.shown_place()

    def shown_place(self) -> str:
        """Return the place that it has shown, also when it has ended."""
        found = [(path.decode(errors="replace"), line.decode()) for path, line in FRAME.findall(self.read(self.places) or b"")]
        return next((f" at {path}:{line}" for path, line in found if is_users(path)), "")

    def end(self) -> int:
        """Kill the process with its group and return its exit code, negative for a signal, as it ended by itself if it did."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # one that has not made its group yet
        _, status = os.waitpid(self.pid, 0)
        for end in (*self.ends, self.exit):
            os.close(end)
        return os.waitstatus_to_exitcode(status)


def end_orphans(workers: set[int]) -> None:
    """Kill what ended workers have left: their descendants have become children of the pool, in any session."""
    for _ in range(1000):
        orphans = _children() - workers
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not orphans:
            return
        time.sleep(0.001)


def _children() -> set[int]:
    own, found = os.getpid(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(state[1]) == own:
                    found.add(int(entry.name))
    return found
