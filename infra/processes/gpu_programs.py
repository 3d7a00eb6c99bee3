"""Programs that may use the GPUs: engines, trainers and reward models. None of them keeps running without an owner that knows of it.

Each has a note in the lock folder, locked by a descriptor that the program inherits. An engine or a persistent trainer between two steps
is not a leftover if the state file of the same workspace names it: that workspace will adopt it.
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

REWARD_MODEL = "reward_model"
"""Kind of the program that scores samples. Its owner talks to it over pipes, and never comes back to it."""


class Noted(BaseModel):
    """The common part of the state files of engine and trainer."""

    process: ProcessRef


class Program(BaseModel):
    """A program that may use the GPUs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    kind: str
    workspace: Path
    state_file: Path | None
    """The file that names it while its owner will come back to it. None: its owner will not."""

    @property
    def role(self) -> str:
        """`trainer`, `reward_model` or `engine`: `sglang` and other kinds are engines."""
        return self.kind if self.kind in ("trainer", REWARD_MODEL) else "engine"

    @property
    def is_expected(self) -> bool:
        """Whether a process of this workspace will adopt it or end it."""
        if self.state_file is None or self.workspace != settings().workspace:
            return False
        noted = read_note(self.state_file, Noted)
        return noted is not None and noted.process.program == self.id


def start(
    kind: str,
    argv: Sequence[str],
    log_path: Path,
    env: Mapping[str, str],
    *,
    state_file: Path | None,
    cwd: Path | None = None,
    descriptors: Sequence[int] = (),
    is_owned: bool = False,
    on_exit: Callable[[int], object] = lambda code: None,
) -> ProcessRef:
    """Start a program that may use the GPUs and keeps running; see `children.start`.

    state_file: Will record who comes back to it. None: it is for this process alone, and a leftover once this process has ended.
    descriptors: Files that it gets besides.
    """
    with _enrolled(kind, state_file) as (program, descriptor):
        return children.start(
            argv,
            log_path,
            env,
            cwd,
            program=program,
            descriptors=(descriptor, *descriptors),
            inherits=child_environment.passed_on(),
            is_owned=is_owned,
            on_exit=on_exit,
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
    """Return the program that is currently being run to its end, found by its mark. None if there is none."""
    for program in _noted():
        if program.state_file is None and program.kind != REWARD_MODEL and (found := children.members(program.id)):
            return children.ref_of(found[0].pid, program.id)
    return None


def stop(ref: ProcessRef) -> None:
    """End a program that was started here, with all its descendants, and remove its shared memory."""
    record_shared_memory(ref)
    children.stop(ref)
    _forget(ref.program)


def record_shared_memory(ref: ProcessRef) -> None:
    """Record the shared-memory segments of a program, so that they can be removed even after it was killed."""
    if names := shared_memory.segments_of(ref.program):
        lock_folder.make()
        write_note(_segments_path(ref.program), sorted(names))


def resident_bytes() -> dict[str, int]:
    """Return the resident memory of running programs by role."""
    held: dict[str, int] = {}
    for program in _noted():
        kind = program.role
        held[kind] = held.get(kind, 0) + children.resident_bytes_of(program.id)
    return held


def programs() -> list[Program]:
    """Return the programs of this workspace that have a note. A program that has just ended may still have one."""
    return [program for program in _noted() if program.workspace == settings().workspace]


def _noted() -> list[Program]:
    found = []
    for path in sorted(lock_folder.programs().glob("*")):
        if path.suffix:  # a note that is being written, or never was completed: its program is not running yet
            continue
        with suppress(FileNotFoundError), private_folder.open_own(path) as stream:  # otherwise it has just ended
            try:
                found.append(Program.model_validate_json(stream.read()))
            except ValidationError:
                _set_aside(path)
    return found


def _set_aside(path: Path) -> None:
    """Handle a note that cannot be read. Its file name is its program's id. The program is ended, since its owner is unknown."""
    log.warning("%s cannot be read: its program is ended, and the note is set aside as %s.odd", path, path.name)
    children.stop_program(path.name)
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.name}.odd"))


def end_leftovers() -> None:
    """End every leftover program of an earlier owner, and wait until it is gone."""
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
    except FileNotFoundError:  # another process noticed its end and removed its note
        return not children.members(program.id)


@contextmanager
def _enrolled(kind: str, state_file: Path | None) -> Iterator[tuple[str, int]]:
    """Yield the id of a program to be started, and the locked descriptor that it will inherit."""
    program = Program(id=children.new_program(), kind=kind, workspace=settings().workspace, state_file=state_file)
    path = _path(program.id)
    lock_folder.make()
    lock_folder.check_held()
    # Written completely before the program starts: a kill in between leaves a note without a program, never a program without a note.
    write_json(path, program.model_dump(mode="json"))
    with private_folder.open_own(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield program.id, stream.fileno()


def _forget(program: str) -> None:
    """Remove the note and the leftover shared memory of a program that has ended."""
    shared_memory.remove(read_note(_segments_path(program), list[str]) or [])
    _segments_path(program).unlink(missing_ok=True)
    _path(program).unlink(missing_ok=True)


def _path(program: str) -> Path:
    return lock_folder.programs() / program


def _segments_path(program: str) -> Path:
    return _path(program).with_suffix(".segments")
