"""One owner of this machine's GPUs at a time, and no program that uses them without an owner.

turn               held (flock) by the process that makes steps: the kernel frees it when that process ends, however it ends
programs/<id>      one for each engine or trainer that was started, locked by a descriptor that the program inherits

Taking the lock first ends what earlier owners left behind: no two owners ever have a program on the GPUs. An engine or a
persistent trainer between two steps is no leftover, as long as the state file of the same workspace names it: it is adopted there.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.machine import devices
from infra.processes import child_environment, children, private_folder, shared_memory
from infra.processes.children import ProcessRef
from infra.settings import settings
from infra.store.files import read_json, read_note, write_json, write_note
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

POLL_S = 0.2
REPEAT_S = 60.0
"""So often a waiter says again for whom it waits."""

P = ParamSpec("P")
T = TypeVar("T")

_turn: ContextVar[IO[str] | None] = ContextVar("turn", default=None)
"""The locked file of the turn that this context has."""


class LockReplaced(RuntimeError):
    """The file of the turn was replaced or removed while it was held: there may be another owner."""


class Holder(BaseModel):
    """Who has the turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    who: str
    workspace: Path
    process: ProcessRef
    since: str
    """Local time."""

    def __str__(self) -> str:
        alive = children.find(self.process)
        state = alive.status() if alive else "ended"
        return f"{self.who} of workspace {self.workspace} (pid {self.process.pid}, {state}, since {self.since})"


class Noted(BaseModel):
    """What the state files of engine and trainer have in common."""

    process: ProcessRef


class Program(BaseModel):
    """A program that may use the GPUs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    kind: str
    workspace: Path
    state_file: Path | None
    """Where it is named as long as its owner will come back to it; None: it will not."""

    @property
    def is_expected(self) -> bool:
        """A process of this workspace will adopt it or end it."""
        if self.state_file is None or self.workspace != settings().workspace:
            return False
        noted = read_note(self.state_file, Noted)
        return noted is not None and noted.process.program == self.id


def folder() -> Path:
    """Where all workers meet that share the same GPUs."""
    if settings().lock_folder:
        return settings().lock_folder or Path()
    if devices.device() == "cpu":
        return Workspace.here().locks  # nothing to share: each workspace is for itself
    return Path(f"/tmp/ratchet-{os.getuid()}")  # of the host, also where TMPDIR is set


@contextmanager
def gpu_lock(who: str, preflight: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Have this machine's GPUs for oneself; waits for their holder, and logs who that is. Within a turn it only calls preflight.

    preflight: Raises an error for what cannot work. It is called before waiting, and again after a wait: what it read may have changed.
    """
    preflight()
    if _turn.get() is not None:
        yield
        return
    _make_folder()
    # Opened for this turn alone: children close it, and other threads of this process wait for it like anybody else.
    with _turn_file() as (stream, has_waited):
        me = Holder(
            who=who,
            workspace=settings().workspace,
            process=children.ref_of(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        write_json(folder() / "turn.json", me.model_dump(mode="json"))
        token = _turn.set(stream)
        try:
            if has_waited:
                preflight()
            end_leftovers()
            yield
        finally:
            _turn.reset(token)
            if private_folder.is_at(stream, folder() / "turn"):  # else the note is that of another owner
                (folder() / "turn.json").unlink(missing_ok=True)


def keeps_lock(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function for a call in a thread that holds the lock of this context too. A thread that outlives the block of the lock, as after
    a cancel, so keeps every other holder waiting until the function returns. Without a lock it is the function itself."""
    if (stream := _turn.get()) is None:
        return function
    own = os.fdopen(os.dup(stream.fileno()), "r+")  # the kernel frees the lock with the last of its descriptors

    def holding(*args: P.args, **kwargs: P.kwargs) -> T:
        with own:
            token = _turn.set(own)
            try:
                return function(*args, **kwargs)
            finally:
                _turn.reset(token)

    return holding


@contextmanager
def _turn_file() -> Iterator[tuple[IO[str], bool]]:
    """The locked file, and whether another holder was waited for. What cleans up old files of /tmp may have taken the file away while we waited, and
    another process made another: then that one counts."""
    path, has_waited = folder() / "turn", False
    while True:
        with private_folder.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            has_waited |= _lock(stream)
            if private_folder.is_at(stream, path):
                os.utime(stream.fileno())
                yield stream, has_waited
                return


def start(
    kind: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str], *, state_file: Path, cwd: Path | None = None
) -> ProcessRef:
    """Start a program that may use the GPUs and stays; see `processes.start`. state_file will say who comes back to it."""
    with _enrolled(kind, state_file) as (program, descriptor):
        return children.start(
            argv, log_path, env, cwd, program=program, descriptors=(descriptor,), inherits=child_environment.passed_on()
        )


def run(
    kind: str,
    argv: Sequence[str],
    log_path: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str],
    cwd: Path,
    on_line: Callable[[str], None],
) -> None:
    """Run a program that may use the GPUs to its end; see `processes.run`."""
    with _enrolled(kind, None) as (program, descriptor):
        try:
            children.run(
                argv,
                log_path,
                timeout_s=timeout_s,
                env=env,
                cwd=cwd,
                on_line=on_line,
                program=program,
                descriptors=(descriptor,),
                inherits=child_environment.passed_on(),
            )
        finally:
            _path(program).unlink(missing_ok=True)


def running_without_state() -> ProcessRef | None:
    """The program that is being run to its end just now, by its mark; None where there is none."""
    for program in _noted():
        if program.state_file is None and (found := children.members(program.id)):
            return children.ref_of(found[0].pid, program.id)
    return None


def stop(ref: ProcessRef) -> None:
    """End a program that was started here, with all that it started, and remove its shared memory."""
    record_shared_memory(ref)
    children.stop(ref)
    _forget(ref.program)


def record_shared_memory(ref: ProcessRef) -> None:
    """Write down the shared-memory segments that a program has, so that they can be removed even after it was killed."""
    if names := shared_memory.segments_of(ref.program):
        _make_folder()
        write_note(_segments_path(ref.program), sorted(names))


def resident_bytes() -> dict[str, int]:
    """Memory that programs hold just now, by their kind: `sglang` and others are the engine, `trainer`."""
    held: dict[str, int] = {}
    for program in _noted():
        kind = program.kind if program.kind == "trainer" else "engine"
        held[kind] = held.get(kind, 0) + children.resident_bytes_of(program.id)
    return held


def programs() -> list[Program]:
    """Those of this workspace that have a note; one that has just ended may still have it."""
    return [program for program in _noted() if program.workspace == settings().workspace]


def _noted() -> list[Program]:
    found = []
    for path in sorted((folder() / "programs").glob("*")):
        if path.suffix:  # of a note that is being written, or never was: its program does not live yet
            continue
        with suppress(FileNotFoundError), private_folder.open_own(path) as stream:  # else it has just ended
            try:
                found.append(Program.model_validate_json(stream.read()))
            except ValidationError:
                _set_aside(path)
    return found


def _set_aside(path: Path) -> None:
    """A note that cannot be read is named as its program is: that is ended, since nothing says who could adopt it."""
    log.warning("%s cannot be read: its program is ended, and the note is set aside as %s.odd", path, path.name)
    children.stop_program(path.name)
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.name}.odd"))


def end_leftovers() -> None:
    """End every program that an owner before us left behind, and wait until it is gone."""
    for program in _noted():
        if not program.is_expected:
            _end_leftover(program)
            _forget(program.id)


def _end_leftover(program: Program) -> None:
    def is_ended() -> bool:
        children.stop_program(program.id)
        return _is_over(program)

    if not _is_over(program):
        log.warning("ending the %s that an earlier owner of workspace %s left behind", program.kind, program.workspace)
        unseen = f"waiting for the {program.kind} of workspace {program.workspace}: its lock is held by a process that cannot be seen here"
        _wait(is_ended, lambda: unseen)


def _is_over(program: Program) -> bool:
    try:
        with private_folder.open_own(_path(program.id)) as stream:
            return not children.members(program.id) and _locked(stream)
    except FileNotFoundError:  # another process saw it end and removed its note
        return not children.members(program.id)


@contextmanager
def _enrolled(kind: str, state_file: Path | None) -> Iterator[tuple[str, int]]:
    """The id of a program to be started, and the locked descriptor that it shall inherit."""
    program = Program(id=children.new_program(), kind=kind, workspace=settings().workspace, state_file=state_file)
    path = _path(program.id)
    _make_folder()
    _check_turn()
    # Complete before the program lives: a kill between the two leaves a note without a program, never the other way round.
    write_json(path, program.model_dump(mode="json"))
    with private_folder.open_own(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield program.id, stream.fileno()


def _make_folder() -> None:
    """Raises ValueError if another user made the lock folder or could change it."""
    try:
        # A folder in the workspace is as safe as the workspace: what lies above it is its user's choice.
        private_folder.make(folder(), checks_parents=not folder().is_relative_to(settings().workspace))
        private_folder.make(folder() / "programs", checks_parents=False)
    except private_folder.NotPrivate as error:
        raise ValueError(
            f"lock folder {folder()} is not safe: {error}; or set RATCHET_LOCK_FOLDER to a folder of yours"
        ) from error


def _check_turn() -> None:
    """Before a program is started: raises LockReplaced if the turn's file is no longer the one that we hold."""
    stream = _turn.get()
    if stream is None:
        return
    if not private_folder.is_at(stream, folder() / "turn"):
        raise LockReplaced(
            f"{folder() / 'turn'} was replaced or removed while this process held it, so another one may use the same GPUs: "
            "see that no other run is at work, then give the same command again"
        )
    os.utime(stream.fileno())  # what cleans up old files of /tmp leaves it alone


def _forget(program: str) -> None:
    """After a program has ended: remove its note and the shared memory that it left."""
    shared_memory.remove(read_note(_segments_path(program), list[str]) or [])
    _segments_path(program).unlink(missing_ok=True)
    _path(program).unlink(missing_ok=True)


def _path(program: str) -> Path:
    return folder() / "programs" / program


def _segments_path(program: str) -> Path:
    return _path(program).with_suffix(".segments")


def _locked(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(stream: IO[str]) -> bool:
    """Return whether another holder was waited for."""
    return _wait(lambda: _locked(stream), lambda: f"waiting for the GPUs: they are held by {_holder()}")


def holder() -> Holder | None:
    """Return the owner that is noted; None where there is none, or one that is just beginning or ending."""
    try:
        return Holder.model_validate(read_json(folder() / "turn.json"))
    except (FileNotFoundError, ValueError):
        return None


def _holder() -> str:
    return str(holder() or "an owner that is just beginning or ending, or work that a cancelled one has left in a thread")


def _wait(is_over: Callable[[], bool], message: Callable[[], str]) -> bool:
    """Return whether it was not over at once."""
    said = -REPEAT_S
    while not is_over():
        if (now := time.monotonic()) - said >= REPEAT_S:
            log.warning("%s", message())
            said = now
        time.sleep(POLL_S)
    return said >= 0
