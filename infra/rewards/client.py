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

from infra.concurrency.deadline import LOOK_S, NO_DEADLINE, Deadline
from infra.config import RewardConfig, RewardFunction
from infra.failures import RewardFailed
from infra.processes import child_environment, children
from infra.rewards import frames, outcome, pool
from infra.rewards.outcome import Outcome
from infra.rewards.signatures import Form
from infra.rewards.worker import Spec
from infra.settings import CHECKOUT
from infra.store import code_digest
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

MAX_WORKERS = 16
"""Of a pool, where reward.workers does not say it."""
# Perf: docs/results/rewards.md. A round through the pool costs a change of process, which a busy machine makes wait.
MAX_CHUNK = 1024
"""Samples that a worker gets at a time."""
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


class PoolClosed(PoolLost):
    """Another caller has closed it while this one waited for it."""


class PoolLate(PoolLost):
    """The deadline was over, and the pool program, which had not been told of it, is ended."""


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

    def do(self, samples: Sequence[bytes], on_outcome: OnOutcome, deadline: Deadline = NO_DEADLINE) -> dict[str, Any]:
        """Have samples judged. on_outcome gets the outcome of each as it comes.

        deadline: When it is over, what has no result is unjudged.

        Raises:
            ValueError: for a reward that cannot be used.
            PoolLate: if it is over, and its clock began after this call.
            PoolLost: if the program ended. It is closed then, and also if the caller is interrupted.
        """
        with self.lock:  # closed inside it: who waits meets a pool that is open, or one that is closed for good
            if self._requests < 0:
                raise PoolClosed(f"the program of reward {self.spec.name!r} was ended by another caller")
            try:
                begins_later, head = deadline.may_begin, {"count": len(samples), "limit_s": deadline.left_s}
                self._send([json.dumps(head).encode(), *samples])
                return self._received(on_outcome, deadline if begins_later else NO_DEADLINE)
            except BaseException:
                self.close()
                raise

    def _send(self, messages: Sequence[bytes]) -> None:
        try:
            frames.write_all(self._requests, b"".join(map(frames.packed, messages)))
        except OSError as error:
            raise PoolLost(f"the program of reward {self.spec.name!r} has ended: {error}") from error

    def _received(self, on_outcome: OnOutcome, deadline: Deadline) -> dict[str, Any]:
        while True:
            self._await_results(deadline)
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

    def _await_results(self, deadline: Deadline) -> None:
        """Wait until the program says something. Raises PoolLost if it does not, PoolLate at the deadline."""
        silence_s = self.spec.timeout_s + pool.START_TIMEOUT_S
        latest = time.monotonic() + silence_s
        while (left_s := latest - time.monotonic()) > 0:
            wait_s = min(left_s, LOOK_S) if deadline.may_begin else deadline.at_most(left_s)
            if select.select([self._results], [], [], wait_s)[0]:
                return
            if deadline.is_over:
                raise PoolLate(f"reward.task_timeout_s was over while reward {self.spec.name!r} was called")
        raise PoolLost(f"the program of reward {self.spec.name!r} said nothing for {silence_s:g} s")

    def _form_of(self, found: dict[str, Any]) -> Form:
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return Form(**values)

    @property
    def is_open(self) -> bool:
        return self._requests >= 0 and self._child.poll() is None and self.owner == os.getpid()

    def close(self) -> None:
        """End the program with its workers and all that they started."""
        requests, self._requests = self._requests, -1
        if requests < 0 or self.owner != os.getpid():
            return
        os.close(requests)  # it ends its workers at the end of its pipe
        os.close(self._results)
        try:
            self._child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        children.kill_program(self.program)


_POOLS: dict[tuple[Any, ...], RewardPool] = {}
_FORMS: dict[tuple[str, str, tuple[str, ...]], Form] = {}
"""By reward, digest of its source and its variables: a scoring whose time is over imports nothing to learn what it takes."""
_LOCK = threading.Lock()


def opened(
    config: RewardConfig, function: RewardFunction, digest: str, *, one_at_a_time: bool = False, python: Path | None = None
) -> RewardPool:
    """Return the pool of a reward, which is started unless this process has it. one_at_a_time, python: See judge.

    digest: Of the reward's source: a pool that imported another state of it is not used.

    Raises:
        RewardFailed: where a new program would import another state of it.
    """
    spec = _spec_of(config, function, one_at_a_time=one_at_a_time)
    key = (os.getpid(), json.dumps(spec), config.environment, digest, python)
    with _LOCK:
        found = _POOLS.pop(key, None)
        if found is None or not found.is_open:
            if changed := code_digest.changed_since(digest):
                raise RewardFailed(
                    f"reward {function.name!r}: {', '.join(map(str, changed))} has changed since this process began to score with it; run the "
                    "same again, and what is not committed is scored by the changed file"
                )
            for other in list(_POOLS)[: max(0, len(_POOLS) - MAX_POOLS + 1)]:
                _POOLS.pop(other).close()
            found = RewardPool(spec, child_environment.of_rewards(config.environment), python)
        _POOLS[key] = found
    return found


def _spec_of(config: RewardConfig, function: RewardFunction, *, one_at_a_time: bool) -> Spec:
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
        max_chunk=1 if one_at_a_time else MAX_CHUNK,
    )


def form_of(config: RewardConfig, function: RewardFunction, digest: str) -> Form:
    """Return the form of a reward, also if the first program is killed before it has said it."""
    key = (json.dumps(_spec_of(config, function, one_at_a_time=False)), digest, config.environment)
    if key not in _FORMS:
        try:
            _FORMS[key] = opened(config, function, digest).form()
        except PoolLost:
            _FORMS[key] = opened(config, function, digest).form()
    return _FORMS[key]


def judge(
    config: RewardConfig,
    function: RewardFunction,
    digest: str,
    samples: Sequence[bytes],
    on_outcome: OnOutcome,
    deadline: Deadline = NO_DEADLINE,
    *,
    one_at_a_time: bool = False,
    python: Path | None = None,
) -> None:
    """Have samples judged; if the pool's program is killed, the missing ones by another one.

    deadline: When it is over, what has no result is unjudged. one_at_a_time: A worker gets the next sample when it has finished one: for
    samples that take long, none of which may wait for another while a worker is free. python: As RewardPool has it.

    Raises:
        RewardFailed: if the program is lost again and again.
    """
    missing = dict(enumerate(samples))
    for attempt in range(MAX_LOST_POOLS + 1):
        numbers = list(missing)

        def take(index: int, found: Outcome, numbers: list[int] = numbers) -> None:
            if missing.pop(numbers[index], None) is not None:
                on_outcome(numbers[index], found)

        try:
            if not deadline.is_over:
                pool_of_reward = opened(config, function, digest, one_at_a_time=one_at_a_time, python=python)
                pool_of_reward.do([missing[number] for number in numbers], take, deadline)
            break
        except PoolLate:
            break
        except PoolLost as error:
            if not isinstance(error, PoolClosed):
                log.warning("%s; %d of %d samples are missing", error, len(missing), len(samples))
            if attempt == MAX_LOST_POOLS:
                raise RewardFailed(f"{error}, {attempt + 1} times: does the reward end other processes than its own?") from error
    for number in list(missing):
        on_outcome(number, outcome.unjudged(outcome.TIME_OUT, "had no result when reward.task_timeout_s was over"))


def close_all() -> None:
    """End the pools of this process."""
    with _LOCK:
        while _POOLS:
            _POOLS.popitem()[1].close()


atexit.register(close_all)
