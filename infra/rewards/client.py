"""The flow's side of a pool of reward workers: started once, kept for the life of this process, one for each reward."""

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.config import RewardConfig, RewardFunction
from infra.failures import RewardFailed
from infra.processes import child_environment, children
from infra.rewards import frames, pool
from infra.rewards.outcome import Outcome
from infra.rewards.signatures import Form
from infra.rewards.worker import Spec
from infra.settings import CHECKOUT
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

MAX_WORKERS = 16
"""Of a pool, where reward.workers does not say it."""
MAX_POOLS = 4
"""That this process keeps; the one that was used longest ago is closed for another one."""
MAX_LOST_POOLS = 2
PROGRAM = pool.__name__
LOG = "rewards.log"
"""What rewards print, in the workspace's folder of logs."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""A worker for each core needs no more threads. Equal hashes make rewards that iterate over sets repeatable."""
OnOutcome = Callable[[int, Outcome], None]


class PoolLost(RuntimeError):
    """The pool program ended, or says nothing any more."""


class RewardPool:
    """A pool program that serves one reward."""

    def __init__(self, spec: Spec, environment: Mapping[str, str], python: Path | None = None) -> None:
        """python: Interpreter of the workers; None: that of this process."""
        self.spec, self.program = spec, children.new_program()
        self.lock = threading.Lock()
        self.owner = os.getpid()
        path = Workspace.here().logs / LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        theirs, self._requests = os.pipe()
        self._results, give = os.pipe()
        with path.open("ab") as output:
            self._child = subprocess.Popen(
                [str(python or sys.executable), "-m", PROGRAM, str(theirs), str(give)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **ONE_THREAD, children.PROGRAM: self.program},
                cwd=CHECKOUT,
                start_new_session=True,
                pass_fds=(theirs, give),
            )
        os.close(theirs)
        os.close(give)
        self._reader = frames.Reader()
        self._send([json.dumps(spec._asdict()).encode()])

    def form(self) -> Form:
        """Return the form of the reward, which a worker imports if none has yet. Raises ValueError for a reward that cannot be used."""
        return self._form_of(self.do([], lambda index, outcome: None))

    def do(self, samples: Sequence[bytes], on_outcome: OnOutcome, until: float | None = None) -> dict[str, Any]:
        """Have samples judged. on_outcome gets the outcome of each as it comes.

        until: Moment of time.monotonic at which what has no result is unjudged.

        Raises:
            ValueError: for a reward that cannot be used.
            PoolLost: if the program ended. It is closed then, and also if the caller is interrupted.
        """
        try:
            with self.lock:
                limit_s = None if until is None else max(0.0, until - time.monotonic())
                self._send([json.dumps({"count": len(samples), "limit_s": limit_s}).encode(), *samples])
                return self._received(on_outcome)
        except BaseException:
            self.close()
            raise

    def _send(self, messages: Sequence[bytes]) -> None:
        try:
            frames.write_all(self._requests, b"".join(map(frames.packed, messages)))
        except OSError as error:
            raise PoolLost(f"the program of reward {self.spec.name!r} has ended: {error}") from error

    def _received(self, on_outcome: OnOutcome) -> dict[str, Any]:
        silence_s = self.spec.timeout_s + pool.START_TIMEOUT_S
        while True:
            if not select.select([self._results], [], [], silence_s)[0]:
                raise PoolLost(f"the program of reward {self.spec.name!r} said nothing for {silence_s:g} s")
            if not (data := os.read(self._results, 2**18)):
                raise PoolLost(f"the program of reward {self.spec.name!r} has ended")
            for message in map(json.loads, self._reader.take(data)):
                if "failed" in message:
                    raise ValueError(message["failed"])
                if "done" in message:
                    form: dict[str, Any] = message["done"]
                    return form
                index = message.pop("index")
                on_outcome(index, Outcome(**{"reward": None, **message}))

    def _form_of(self, found: dict[str, Any]) -> Form:
        return Form(**{**found, "takes": tuple(found["takes"]), "named": tuple(found["named"])})

    @property
    def is_open(self) -> bool:
        return self._requests >= 0 and self._child.poll() is None and self.owner == os.getpid()

    def close(self) -> None:
        """End the program with its workers and all that they started."""
        if self._requests < 0 or self.owner != os.getpid():
            return
        os.close(self._requests)  # it ends its workers at the end of its pipe
        os.close(self._results)
        self._requests = -1
        try:
            self._child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        children.kill_program(self.program)


_POOLS: dict[tuple[Any, ...], RewardPool] = {}
_LOCK = threading.Lock()


def opened(config: RewardConfig, function: RewardFunction, digest: str, python: Path | None = None) -> RewardPool:
    """Return the pool of a reward, which is started unless this process has it.

    digest: Of the reward's source: a pool that imported another state of it is not used.
    """
    spec = _spec_of(config, function)
    key = (os.getpid(), json.dumps(spec), config.environment, digest, python)
    with _LOCK:
        found = _POOLS.pop(key, None)
        if found is None or not found.is_open:
            for other in list(_POOLS)[: max(0, len(_POOLS) - MAX_POOLS + 1)]:
                _POOLS.pop(other).close()
            found = RewardPool(spec, child_environment.of_rewards(config.environment), python)
        _POOLS[key] = found
    return found


def _spec_of(config: RewardConfig, function: RewardFunction) -> Spec:
    path, _, _ = function.name.rpartition(":")
    return Spec(
        name=function.name,
        folder=str(Path(path).parent) if path.endswith(".py") else os.getcwd(),
        workers=config.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0))),
        memory_mib=config.memory_mib,
        cpu_s=config.cpu_s,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
        weights=function.weights,
    )


def form_of(config: RewardConfig, function: RewardFunction, digest: str) -> Form:
    """Return the form of a reward, also if the first program is killed before it has said it."""
    try:
        return opened(config, function, digest).form()
    except PoolLost:
        return opened(config, function, digest).form()


def judge(
    config: RewardConfig,
    function: RewardFunction,
    digest: str,
    samples: Sequence[bytes],
    on_outcome: OnOutcome,
    until: float | None = None,
    python: Path | None = None,
) -> None:
    """Have samples judged; if the pool's program is killed, the missing ones by another one.

    until: As RewardPool.do has it. python: As RewardPool has it.

    Raises:
        RewardFailed: if the program is lost again and again.
    """
    missing = dict(enumerate(samples))
    for attempt in range(MAX_LOST_POOLS + 1):
        numbers = list(missing)

        def take(index: int, outcome: Outcome, numbers: list[int] = numbers) -> None:
            if missing.pop(numbers[index], None) is not None:
                on_outcome(numbers[index], outcome)

        try:
            opened(config, function, digest, python).do([missing[number] for number in numbers], take, until)
            return
        except PoolLost as error:
            log.warning("%s; %d of %d samples are missing", error, len(missing), len(samples))
            if attempt == MAX_LOST_POOLS:
                raise RewardFailed(f"{error}, {attempt + 1} times: does the reward end other processes than its own?") from error


def close_all() -> None:
    """End the pools of this process."""
    with _LOCK:
        while _POOLS:
            _POOLS.popitem()[1].close()


atexit.register(close_all)
