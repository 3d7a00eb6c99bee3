"""Child processes: started in a session of their own, logged to a file, found again by pid and start time, ended as a tree.

A pid alone says nothing after a while, so a process is always named by a ProcessRef.
"""

import contextlib
import contextvars
import logging
import os
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

log = logging.getLogger(__name__)

GRACE_S = 15.0
NUM_TAIL_LINES = 40


class ProgramFailed(RuntimeError):
    """A child program ended with an error; the message holds the end of its output."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ProgramTimedOut(ProgramFailed):
    pass


class ProcessRef(BaseModel):
    """A process of this machine, told apart from a later one that got the same pid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started_at: float
    """Seconds since the epoch, as the kernel gives it."""


def ref_of(pid: int) -> ProcessRef:
    return ProcessRef(pid=pid, started_at=psutil.Process(pid).create_time())


def find(ref: ProcessRef) -> psutil.Process | None:
    """The living process behind a reference; a zombie is not alive."""
    try:
        process = psutil.Process(ref.pid)
        # boot-time arithmetic makes create_time jitter by a clock tick
        if abs(process.create_time() - ref.started_at) > 0.05 or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process
    except psutil.NoSuchProcess:
        return None


def start(argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> ProcessRef:
    """Start a server that outlives this process; its output goes to log_path."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(env),
            cwd=cwd,
            start_new_session=True,
        )
    ref = ref_of(child.pid)
    # Reaps the child if it ends while we live, so that it never lingers as a zombie.
    threading.Thread(target=child.wait, daemon=True).start()
    return ref


def stop(ref: ProcessRef, grace_s: float = GRACE_S) -> None:
    """End a process and all its descendants: ask, wait, kill, wait."""
    root = find(ref)
    if root is None:
        return
    # torchrun's ranks have sessions of their own: a signal to its group would miss them.
    tree = [root, *_descendants(root)]
    with contextlib.suppress(psutil.NoSuchProcess):
        root.terminate()
    psutil.wait_procs([root], timeout=grace_s)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree.extend(child for child in _descendants(process) if child not in tree)
            process.terminate()
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
) -> None:
    """Run a program to its end; each line of its output goes to log_path and to on_line.

    Raises:
        ProgramTimedOut: after timeout_s; the program and its descendants are gone by then.
        ProgramFailed: if it exits with another code than 0.
    """
    name = Path(argv[0]).name
    log_path.parent.mkdir(parents=True, exist_ok=True)
    mark = f"RUN_{uuid.uuid4().hex}"
    with _child(argv, mark, env, cwd) as child, log_path.open("w") as output:
        expired = threading.Event()
        threading.Thread(target=_watch, args=(child, ref_of(child.pid), mark, timeout_s, expired), daemon=True).start()
        tail = _follow(child, output.write, on_line)
        exit_code = child.wait()
    ending = f"; the end of {log_path}:\n" + "\n".join(tail)
    if expired.is_set():
        raise ProgramTimedOut(f"{name} was ended after {timeout_s:g} s{ending}", exit_code)
    if exit_code:
        raise ProgramFailed(f"{name} exited with {exit_code}{ending}", exit_code)


@contextlib.contextmanager
def _child(argv: Sequence[str], mark: str, env: Mapping[str, str] | None, cwd: Path | None) -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**_environment(env), mark: "1"},
        cwd=cwd,
        start_new_session=True,
    )
    ref = ref_of(child.pid)
    try:
        yield child
    finally:  # on success, failure, time-out, cancellation and KeyboardInterrupt alike
        stop(ref)
        child.wait()
        _end_orphans(mark)


def _follow(child: "subprocess.Popen[str]", write: Callable[[str], object], on_line: Callable[[str], None]) -> list[str]:
    assert child.stdout is not None
    tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
    for line in child.stdout:
        write(line)
        tail.append(line.rstrip("\n"))
        on_line(tail[-1])
    return list(tail)


def _watch(child: "subprocess.Popen[str]", ref: ProcessRef, mark: str, timeout_s: float, expired: threading.Event) -> None:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        expired.set()
        stop(ref)
    # They hold the program's output open: whoever reads it would wait for them.
    _end_orphans(mark)


def _end_orphans(mark: str) -> None:
    """End what a program that died left behind: nobody's children now, but with the mark in the environment they inherited."""
    orphans = [process for process in psutil.process_iter() if _is_marked(process, mark)]
    for process in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(orphans, timeout=5)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return mark in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **(changes or {})}


def last_lines(path: Path, count: int = NUM_TAIL_LINES) -> str:
    """The end of a log, for an error message."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else f"({path} does not exist)"


@contextlib.contextmanager
def followed(path: Path, on_line: Callable[[str], None], poll_s: float = 0.5) -> Iterator[None]:
    """Hand on each line that is appended to a file while the block runs, once it is whole."""
    done = threading.Event()
    position = path.stat().st_size if path.exists() else 0

    def follow() -> None:
        nonlocal position
        while True:
            ending = done.wait(poll_s)
            if path.exists():
                with path.open("rb") as stream:
                    stream.seek(position)
                    found = stream.read()
                whole = found if ending else found[: found.rfind(b"\n") + 1]
                position += len(whole)
                for line in whole.decode(errors="replace").splitlines():
                    on_line(line)
            if ending:
                return

    # in the caller's context: the lines belong to the task that asked for them
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)


def resident_bytes(ref: ProcessRef) -> int:
    """Memory that a process and its descendants hold; pages that they share count once in each."""
    root = find(ref)
    total = 0
    for process in [root, *_descendants(root)] if root else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def port_owner(port: int) -> str:
    """Who listens on a port of this machine, for a message."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return f"pid {connection.pid}" if connection.pid else "a process of another user"
    return "nobody any more"


def free_port(first_choice: int, host: str = "127.0.0.1") -> int:
    """first_choice, or the next port where nobody listens; says so where it had to choose another."""
    for port in range(first_choice, first_choice + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                log.warning("port %d is taken by %s, trying the next", port, port_owner(port))
                continue
            return port
    raise ValueError(f"ports {first_choice} to {first_choice + 99} are all taken; set another first choice")


def wait_until(ready: Callable[[], bool], *, what: str, timeout_s: float, ref: ProcessRef, log_path: Path) -> None:
    """Wait for a server that we started.

    Raises:
        ProgramFailed: if it ends first.
        ProgramTimedOut: after timeout_s; the server is ended.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if find(ref) is None:
            raise ProgramFailed(f"{what} ended while starting; the end of {log_path}:\n{last_lines(log_path)}")
        if time.monotonic() > deadline:
            stop(ref)
            raise ProgramTimedOut(f"{what} was not ready after {timeout_s:g} s; the end of {log_path}:\n{last_lines(log_path)}")
        time.sleep(0.25)
