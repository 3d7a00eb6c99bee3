"""Child programs: started in their own session, logged to a file, found again after any crash, ended with all their descendants.

A pid can be reused, so a process is always identified by a ProcessRef. Every process of a program carries the program's id in its
environment, so it is found even after its parents are gone.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from infra.processes import procfs
from infra.processes.logs import NUM_TAIL_LINES, fresh_log, last_lines

GRACE_S = 15.0
PROGRAM = "RATCHET_PROGRAM"
WITH_OWNER = Path(__file__).with_name("with_owner.py")


class ProgramFailed(RuntimeError):
    """A child program ended with an error. The message contains the end of its output."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ProgramTimedOut(ProgramFailed):
    pass


class ProcessRef(BaseModel):
    """A process of this machine, distinguished from a later one with the same pid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started_ticks: int
    """Clock ticks from boot to its start, as reported by the kernel. Setting the clock does not change them."""
    boot: str
    """The kernel's id of that boot."""
    program: str = ""
    """The id that its whole program carries in its environment; empty for a process that is not ours."""


def new_program() -> str:
    """Return a new id of a program, for PROGRAM in its environment."""
    return uuid.uuid4().hex


def ref_of(pid: int, program: str = "") -> ProcessRef:
    """Make a reference to a process. Raises ProcessLookupError if there is no such process."""
    ticks, _ = procfs.start_and_state(pid)
    return ProcessRef(pid=pid, started_ticks=ticks, boot=procfs.boot_id(), program=program)


def find(ref: ProcessRef) -> psutil.Process | None:
    """Return the live process of a reference. A zombie is not alive."""
    try:
        ticks, state = procfs.start_and_state(ref.pid)
        is_it = (ticks, procfs.boot_id()) == (ref.started_ticks, ref.boot) and state not in procfs.DEAD
        return psutil.Process(ref.pid) if is_it else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


def members(program: str) -> list[psutil.Process]:
    """Return the live processes of a program, by the id in their inherited environment."""
    return [process for process in psutil.process_iter() if _belongs(process, program)] if program else []


def of_program(pids: Iterable[int], program: str) -> set[int]:
    """Return those of these processes that belong to a program. Checking all running processes takes 5 ms."""
    return {pid for pid in pids if _has_mark(pid, program)} if program else set()


def _belongs(process: psutil.Process, program: str) -> bool:
    try:
        return _has_mark(process.pid, program) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_mark(pid: int, program: str) -> bool:
    return procfs.has_variable(pid, f"{PROGRAM}={program}")


def start(
    argv: Sequence[str],
    log_path: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    program: str | None = None,
    descriptors: Sequence[int] = (),
    inherits: Mapping[str, str] | None = None,
    is_owned: bool = False,
    on_exit: Callable[[int], object] = lambda code: None,
) -> ProcessRef:
    """Start a server that outlives this process. Its output goes to log_path.

    env: Variables added to the inherited ones.
    inherits: Variables that it gets from this process's environment; None: all.
    descriptors: Files that it holds open for as long as it lives.
    is_owned: It ends with this process, even if this process is killed, and with the calling thread.
    on_exit: Called with its exit code if it ends before this process.
    """
    program = program or new_program()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as output:
        child = subprocess.Popen(
            [*(_with_owner() if is_owned else ()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(env, program, inherits),
            cwd=cwd,
            start_new_session=True,
            pass_fds=descriptors,
        )
    ref = ref_of(child.pid, program)
    # Reaps the child if it ends before this process, so that it never lingers as a zombie.
    threading.Thread(target=lambda: on_exit(child.wait()), daemon=True).start()
    return ref


def stop(ref: ProcessRef, grace_s: float = GRACE_S) -> None:
    """End a process and all its descendants, even if it is dead itself: SIGTERM, wait, SIGKILL, wait."""
    root = find(ref)
    if root is not None:
        # torchrun's ranks have their own sessions: a signal to its group would miss them.
        tree = _descendants(root)
        _ask(root)
        psutil.wait_procs([root], timeout=grace_s)
        _end([root, *tree])
    stop_program(ref.program)


def wait_until_gone(ref: ProcessRef, timeout_s: float) -> None:
    """Wait until a process that was asked to end has ended.

    Raises:
        ProgramTimedOut: if it is still alive; names it.
    """
    deadline = time.monotonic() + timeout_s
    while find(ref) is not None:
        if time.monotonic() > deadline:
            raise ProgramTimedOut(
                f"process {ref.pid} was told to end and is still alive after {timeout_s:g} s: `kill {ref.pid}` ends it"
            )
        time.sleep(0.1)


def stop_program(program: str) -> None:
    """End all processes of a program of which only the id is known."""
    _end(members(program))


def kill_program(program: str) -> None:
    """Kill all processes of a program at once, without asking: they run code that may do anything."""
    for process in members(program):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _ask(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        process.resume()  # a stopped process would never receive it


def _end(tree: list[psutil.Process]) -> None:
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree.extend(child for child in _descendants(process) if child not in tree)
            _ask(process)
    _, alive = psutil.wait_procs([process for process in tree if process.is_running()], timeout=2)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def run(
    argv: Sequence[str],
    log_path: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    program: str | None = None,
    descriptors: Sequence[int] = (),
    inherits: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end. Each line of its output goes to log_path and to on_line.

    The program ends with this process, even if this process is killed, and with the calling thread.

    env, inherits: As for `start`.
    descriptors: Files that it holds open for as long as it lives.

    Raises:
        ProgramTimedOut: after timeout_s. The program and its descendants have ended by then.
        ProgramFailed: if it exits with another code than 0.
    """
    name = Path(argv[0]).name
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        _child(argv, _environment(env, program or new_program(), inherits), cwd, descriptors) as (child, ref),
        fresh_log(log_path).open("w") as output,
    ):
        expired = threading.Event()
        threading.Thread(target=_watch, args=(child, ref, timeout_s, expired), daemon=True).start()
        tail = _follow(child, output.write, on_line)
        exit_code = child.wait()
    ending = f"; the end of {log_path}:\n" + "\n".join(tail)
    if expired.is_set():
        raise ProgramTimedOut(f"{name} was ended after {timeout_s:g} s{ending}", exit_code)
    if exit_code:
        raise ProgramFailed(f"{name} exited with {exit_code}{ending}", exit_code)


@contextlib.contextmanager
def _child(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, descriptors: Sequence[int]
) -> Iterator[tuple["subprocess.Popen[str]", ProcessRef]]:
    child = subprocess.Popen(
        [*_with_owner(), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=True,
        pass_fds=descriptors,
    )
    ref = ref_of(child.pid, env[PROGRAM])
    try:
        yield child, ref
    finally:  # on success, failure, time-out, cancellation and KeyboardInterrupt alike
        stop(ref)
        child.wait()


def _with_owner() -> list[str]:
    # -I -S: the environment is meant for the program, and finding its site-packages takes time
    return [sys.executable, "-I", "-S", str(WITH_OWNER), str(os.getpid())]


def _follow(child: "subprocess.Popen[str]", write: Callable[[str], object], on_line: Callable[[str], None]) -> list[str]:
    assert child.stdout is not None
    tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
    for line in child.stdout:
        write(line)
        tail.append(line.rstrip("\n"))
        on_line(tail[-1])
    return list(tail)


def _watch(child: "subprocess.Popen[str]", ref: ProcessRef, timeout_s: float, expired: threading.Event) -> None:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        expired.set()
    # Leftover processes of a dead program hold its output open: a reader of the output would wait for them.
    stop(ref)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _environment(changes: Mapping[str, str] | None, program: str, inherits: Mapping[str, str] | None) -> dict[str, str]:
    # setproctitle, which SGLang uses, would overwrite a process's environment with its title, and so our mark.
    return {
        **(os.environ if inherits is None else inherits),
        "PYTHONUNBUFFERED": "1",
        **(changes or {}),
        PROGRAM: program,
        "SPT_NOENV": "1",
    }


def resident_bytes(ref: ProcessRef) -> int:
    """Resident memory of a program's processes. Shared pages count in each of them."""
    return resident_bytes_of(ref.program)


def resident_bytes_of(program: str) -> int:
    """Resident memory of the processes that carry a program's id."""
    total = 0
    for process in members(program):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def wait_until(
    ready: Callable[[], bool],
    *,
    what: str,
    timeout_s: float,
    ref: ProcessRef,
    log_path: Path,
    is_alive: Callable[[], bool] | None = None,
) -> None:
    """Wait for a server that we started.

    is_alive: Whether it lives, if it is not a process of this machine.

    Raises:
        ProgramFailed: if it ends first.
        ProgramTimedOut: after timeout_s. The server is ended.
    """
    begun = time.monotonic()
    while not ready():
        if not (is_alive() if is_alive else find(ref) is not None):
            raise ProgramFailed(f"{what} ended while starting; the end of {log_path}:\n{last_lines(log_path)}")
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            stop(ref)
            raise ProgramTimedOut(f"{what} was not ready after {timeout_s:g} s; the end of {log_path}:\n{last_lines(log_path)}")
        time.sleep(min(0.25, 0.01 + waited_s / 10))  # a question costs milliseconds of CPU time
