"""A worker: imports one reward and calls it with chunks of samples until its pipe closes. The pool forks it; see pool.py.

A sample may leave the process changed: folder, signals, timers, standard streams. All of it is put back before the next one.
"""

import ctypes
import faulthandler
import json
import math
import os
import resource
import signal
import sys
from typing import Any, NamedTuple, NoReturn, TextIO

from infra.rewards import frames
from infra.rewards.calls import Caller
from infra.rewards.loading import load
from infra.rewards.outcome import Outcome

PR_SET_PDEATHSIG = 1
SHOW_PLACE = signal.SIGUSR1
"""Has the worker write where it is to its pipe `places`, also while C code holds the interpreter."""
SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXCPU)
REFUSED = 3
"""Exit code of a worker whose reward cannot be used."""


class Spec(NamedTuple):
    """The reward of a pool and its limits."""

    name: str
    """`/home/me/mine.py:score` or `module.function`."""
    folder: str
    """Working folder of the workers."""
    workers: int
    memory_mib: int
    cpu_s: int | None
    timeout_s: float
    concurrency: int
    weights: dict[str, float]
    max_chunk: int
    """Most samples that a worker gets at a time. 1: they take so long, or so unequally long, that none may wait behind another."""


class PipeEnds(NamedTuple):
    """A worker's ends of its pipes."""

    requests: int
    results: int
    output: int
    places: int


def run(spec: Spec, ends: PipeEnds, pool: int) -> NoReturn:
    """Be a worker. Never returns; the process was forked from the pool, which is this process's parent."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != pool:
        os._exit(REFUSED)
    _take_streams(ends)
    _limit_memory(spec.memory_mib)
    faulthandler.register(SHOW_PLACE, file=ends.places, all_threads=False)
    faulthandler.register(signal.SIGXCPU, file=ends.places, all_threads=False, chain=True)  # then it ends the process
    try:
        _serve(spec, ends)
    except BaseException:  # noqa: BLE001  # the pipes are gone: a sample closed them, or the pool ended
        os._exit(REFUSED)
    os._exit(0)


def _take_streams(ends: PipeEnds) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (ends.output, 1), (ends.output, 2)):
        os.dup2(source, target)
    kept = sorted({0, 1, 2, *ends})
    for before, after in zip(kept, [*kept[1:], 65536], strict=True):
        os.closerange(before + 1, after)
    sys.stdin, sys.stdout, sys.stderr = [_stream(number) for number in (0, 1, 2)]


def _stream(number: int) -> TextIO:
    return open(number, "w" if number else "r", buffering=1, errors="replace", closefd=False)


def _limit_memory(memory_mib: int) -> None:
    """Limit what the process may write to: RLIMIT_DATA counts no address space that is only reserved, as libraries do."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(cpu_s: int | None) -> None:
    """Give the process cpu_s more than it has used. The system counts whole seconds, and sends SIGXCPU, also to C code."""
    if cpu_s is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if most == resource.RLIM_INFINITY else min(seconds, most), most))


def _serve(spec: Spec, ends: PipeEnds) -> None:
    own = os.getpid()
    os.chdir(spec.folder)
    try:
        loaded = load(spec.name)
    except ValueError as error:
        _send(ends, {"failed": " ".join(str(error).split())})
        return
    if os.getpid() != own:  # a fork that the reward's file made
        return
    caller = Caller(loaded, spec.weights, spec.concurrency, spec.timeout_s)
    state = _State(spec.folder)
    _send(ends, {"ready": loaded.form._asdict()})
    while (head := frames.read(ends.requests)) is not None:
        indices: list[int] = json.loads(head)
        samples = [json.loads(frames.read(ends.requests) or b"") for _ in indices]
        _limit_cpu(spec.cpu_s)
        for position, outcome in caller.outcomes(samples):
            if os.getpid() != own:  # a fork that the reward made and that returned as well
                return
            state.restore()
            _limit_cpu(spec.cpu_s)
            _send(ends, {"index": indices[position], **_content(outcome)})


def _content(outcome: Outcome) -> dict[str, object]:
    return {name: value for name, value in outcome._asdict().items() if value not in ("", None)}


def _send(ends: PipeEnds, content: dict[str, object]) -> None:
    frames.write(ends.results, json.dumps(content).encode())


class _State:
    """What a sample may change in the process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.streams = [sys.stdin, sys.stdout, sys.stderr]
        self.copies = [(os.dup(number), number) for number in (0, 1, 2)]
        self.recursion = sys.getrecursionlimit()
        self.handlers: list[tuple[int, Any]] = [(number, signal.getsignal(number)) for number in SIGNALS]

    # Perf: 10 us a sample (docs/results/rewards.md).
    def restore(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.handlers:
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(self.folder)
        for copy, number in self.copies:
            os.dup2(copy, number)
        sys.setrecursionlimit(self.recursion)
        if any(stream.closed for stream in self.streams):
            self.streams = [_stream(number) for number in (0, 1, 2)]
        sys.stdin, sys.stdout, sys.stderr = self.streams
