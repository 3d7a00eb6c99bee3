"""Programs that may use the GPUs: engines and trainers. None of them lives on without an owner who knows of it.

Each has a note in the lock folder, locked by a descriptor that the program inherits. An engine or a persistent trainer between two steps
is no leftover, as long as the state file of the same workspace names it: it is adopted there.
"""

import fcntl
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.processes import child_environment, children, lock_folder, private_folder, shared_memory
from infra.processes.children import ProcessRef
from infra.settings import settings
from infra.store.files import read_note, write_json, write_note

log = logging.getLogger(__name__)


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


def start(
    kind: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str], *, state_file: Path, cwd: Path | None = None
) -> ProcessRef:
    """Start a program that may use the GPUs and stays; see `children.start`. state_file will say who comes back to it."""
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
    """Run a program that may use the GPUs to its end; see `children.run`."""
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
        lock_folder.make()
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
    for path in sorted(lock_folder.programs().glob("*")):
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
        lock_folder.wait(is_ended, lambda: unseen)


def _is_over(program: Program) -> bool:
    try:
        with private_folder.open_own(_path(program.id)) as stream:
            return not children.members(program.id) and lock_folder.try_to_lock(stream)
    except FileNotFoundError:  # another process saw it end and removed its note
        return not children.members(program.id)


@contextmanager
def _enrolled(kind: str, state_file: Path | None) -> Iterator[tuple[str, int]]:
    """The id of a program to be started, and the locked descriptor that it shall inherit."""
    program = Program(id=children.new_program(), kind=kind, workspace=settings().workspace, state_file=state_file)
    path = _path(program.id)
    lock_folder.make()
    lock_folder.check_held()
    # Complete before the program lives: a kill between the two leaves a note without a program, never the other way round.
    write_json(path, program.model_dump(mode="json"))
    with private_folder.open_own(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield program.id, stream.fileno()


def _forget(program: str) -> None:
    """After a program has ended: remove its note and the shared memory that it left."""
    shared_memory.remove(read_note(_segments_path(program), list[str]) or [])
    _segments_path(program).unlink(missing_ok=True)
    _path(program).unlink(missing_ok=True)


def _path(program: str) -> Path:
    return lock_folder.programs() / program


def _segments_path(program: str) -> Path:
    return _path(program).with_suffix(".segments")
