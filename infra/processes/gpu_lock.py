"""The GPU lock: one holder of this machine's GPUs at a time.

Taking the lock first ends leftover programs of earlier holders. So two holders never have programs on the GPUs at the same time.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict

from infra.processes import children, gpu_programs, lock_folder, private_folder
from infra.processes.children import ProcessRef
from infra.settings import settings
from infra.store.files import read_json, write_json

P = ParamSpec("P")
T = TypeVar("T")


class Holder(BaseModel):
    """The holder of the GPU lock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    who: str
    workspace: Path
    process: ProcessRef
    since: str
    """When the lock was taken, in local time."""

    def __str__(self) -> str:
        alive, state = children.find(self.process), "ended"
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            state = alive.status() if alive else state
        return f"{self.who} of workspace {self.workspace} (pid {self.process.pid}, {state}, since {self.since})"


@contextmanager
def gpu_lock(who: str, preflight: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold this machine's GPUs exclusively. Waits for their current holder, and logs who that is. If this context holds the lock already, it
    only calls preflight.

    preflight: Raises an error for anything that cannot work. Called before waiting, and again after a wait, since its inputs may have changed.
    """
    preflight()
    if lock_folder.held.get() is not None:
        yield
        return
    lock_folder.make()
    # Opened for this holder alone: children close it, and other threads of this process wait for it like other processes.
    with _lock_file() as (stream, has_waited):
        me = Holder(
            who=who,
            workspace=settings().workspace,
            process=children.ref_of(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        write_json(lock_folder.holder_path(), me.model_dump(mode="json"))
        token = lock_folder.held.set(stream)
        try:
            if has_waited:
                preflight()
            gpu_programs.end_leftovers()
            yield
        finally:
            lock_folder.held.reset(token)
            if private_folder.is_at(stream, lock_folder.lock_path()):  # otherwise the note belongs to another holder
                lock_folder.holder_path().unlink(missing_ok=True)


def keeps_lock(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that its thread also holds the lock of this context. If the thread outlives the block of the lock, as after a
    cancel, other holders wait until the function returns. Without a lock it returns the function unchanged."""
    if (stream := lock_folder.held.get()) is None:
        return function
    own = os.fdopen(os.dup(stream.fileno()), "r+")  # the kernel frees the lock with the last of its descriptors

    def holding(*args: P.args, **kwargs: P.kwargs) -> T:
        with own:
            token = lock_folder.held.set(own)
            try:
                return function(*args, **kwargs)
            finally:
                lock_folder.held.reset(token)

    return holding


@contextmanager
def _lock_file() -> Iterator[tuple[IO[str], bool]]:
    """Return the locked file, and whether there was a wait for another holder. A cleaner of old files in /tmp may have removed the file during
    the wait, and another process may have made a new one: then the new file is locked."""
    path, has_waited = lock_folder.lock_path(), False
    while True:
        with private_folder.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            has_waited |= _waits_for(stream)
            if private_folder.is_at(stream, path):
                os.utime(stream.fileno())
                yield stream, has_waited
                return


def holder() -> Holder | None:
    """Return the recorded holder. None if there is none, or one that is just starting or ending."""
    try:
        return Holder.model_validate(read_json(lock_folder.holder_path()))
    except (FileNotFoundError, ValueError):
        return None


def _waits_for(stream: IO[str]) -> bool:
    """Lock the file. Returns whether there was a wait for another holder."""
    return lock_folder.wait(lambda: lock_folder.try_to_lock(stream), _message)


def _message() -> str:
    unnoted = "an owner that is just beginning or ending, or work that a cancelled one has left in a thread"
    return f"waiting for the GPUs: they are held by {holder() or unnoted}"
