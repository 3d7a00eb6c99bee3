"""The pool program: gives samples to worker processes and passes on what they came to.

    flow process --samples--> pool program --chunks--> worker, worker, ...   each imports one reward
    (client.py)  <-results--  (pool.py)    <-results-  (worker.py)           no secrets, a memory limit, a deadline

It imports the standard library only, so that it starts in milliseconds.

    python -m infra.rewards.pool REQUESTS RESULTS      two inherited pipes, from and to the flow process

First comes the worker's Spec, then jobs. A job is {"count": n, "limit_s": s} with n samples; n is 0 for a check that the reward can be
imported. Each sample gets one result, in any order, then {"done": ...} comes, or {"failed": message} if the reward cannot be used. What has no
result after limit_s is unjudged. The program ends with everything that it started when its pipe is closed, so also when the flow process is
killed.
"""

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import sys
import time
from collections import deque
from typing import Any

from infra.rewards import frames
from infra.rewards.outcome import DIED, TIME_OUT, unjudged
from infra.rewards.processes import Worker, end_orphans
from infra.rewards.worker import Spec

PR_SET_CHILD_SUBREAPER = 36
START_TIMEOUT_S = 300.0
"""Longest time in which a reward's file is imported and its class set up."""
GRACE_S = 1.0
"""What an async reward gets beyond timeout_s: it keeps its own time."""
CHUNK_S = (0.02, 0.1)
"""A worker gets more samples at a time if a chunk took less than the first, fewer if it took more than the second."""
BATCH = 64
"""Samples that a batch function gets at a time."""
MAX_OUTPUT_BYTES = 2**20
"""What a job's workers print beyond this is dropped."""
MAX_LOST_STARTS = 2
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a worker that another process ended, such as the system when memory is short: that may come right."""


class Failed(RuntimeError):
    """The reward cannot be used."""


class Pool:
    def __init__(self, spec: Spec, requests: int, results: int) -> None:
        self.spec, self.requests, self.results = spec, requests, results
        self.workers: dict[int, Worker] = {}
        self.form: dict[str, Any] | None = None
        """Form of the reward, once a worker has imported it."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(requests, selectors.EVENT_READ)
        self.tasks: list[bytes] = []
        self.waiting: deque[int] = deque()
        self.alone: deque[int] = deque()
        """Samples that are tried without others: their worker ended or gave no result in time."""
        self.tried_again: set[int] = set()
        self.num_left = self.num_output = self.num_lost_starts = 0
        self.until = math.inf

    def do(self, tasks: list[bytes], limit_s: float | None) -> dict[str, Any]:
        """Do a job and return the reward's form. Raises Failed, or EOFError if the flow process is gone."""
        self.tasks, self.waiting, self.num_left = tasks, deque(range(len(tasks))), len(tasks)
        self.alone.clear()
        self.tried_again.clear()
        self.num_output = self.num_lost_starts = 0
        self.until = math.inf if limit_s is None else time.monotonic() + limit_s
        for worker in self.workers.values():
            worker.chunk = 1  # how long the samples of an earlier job took says nothing about these
        while self.num_left or self.form is None:
            self._start_workers()
            self._give()
            for key, _ in self.selector.select(self._seconds_to_deadline()):
                if key.data is None:
                    raise EOFError
                worker, kind = key.data
                if worker.pid in self.workers:
                    self._hear(worker, kind)
            self._end_late_ones()
            if time.monotonic() >= self.until:
                self._give_up()
        return self.form

    def close(self) -> None:
        for worker in list(self.workers.values()):
            worker.end()
        end_orphans(set())

    def _start_workers(self) -> None:
        is_async = self.form is not None and self.form["is_async"] and self.form["kind"] not in ("batch", "trl")
        most = 1 if self.form is None or is_async else self.spec.workers
        free = sum(worker.is_idle or not worker.is_ready for worker in self.workers.values())
        wanted = max(len(self.waiting) + len(self.alone) - free, 0 if self.workers else 1)
        for _ in range(min(most - len(self.workers), wanted)):
            worker = Worker(self.spec)
            self.workers[worker.pid] = worker
            for end, kind in ((worker.results, "results"), (worker.output, "output"), (worker.exit, "exit")):
                self.selector.register(end, selectors.EVENT_READ, (worker, kind))

    def _give(self) -> None:
        for worker in self.workers.values():
            if worker.is_idle and (chunk := self._chunk(worker)):
                head = json.dumps(chunk).encode()
                worker.outgoing += b"".join(map(frames.packed, (head, *(self.tasks[index] for index in chunk))))
                worker.pending.extend(chunk)
                worker.since = worker.given_at = time.monotonic()
                worker.flush()
                if worker.outgoing:
                    self.selector.register(worker.requests, selectors.EVENT_WRITE, (worker, "requests"))

    def _chunk(self, worker: Worker) -> list[int]:
        assert self.form is not None
        if self.alone:
            return [self.alone.popleft()]
        # A share of the rest, so that the workers end together.
        size = min(worker.chunk, math.ceil(len(self.waiting) / (2 * self.spec.workers)))
        if self.form["kind"] in ("batch", "trl"):
            size = BATCH
        elif self.form["is_async"]:
            size = 4 * self.spec.concurrency
        return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]

    def _hear(self, worker: Worker, kind: str) -> None:
        match kind:
            case "results":
                self._take_results(worker)
            case "output":
                self._take_output(worker)
            case "requests":
                worker.flush()
                if not worker.outgoing:
                    self.selector.unregister(worker.requests)
            case "exit":
                self._take_output(worker)
                if self._take_results(worker):
                    self._bury(worker)

    def _take_results(self, worker: Worker) -> bool:
        """Pass on what a worker says. Returns whether the worker is still there: one that says what it cannot have to say is ended."""
        sent: list[bytes] = []
        is_broken = False
        try:
            for message in worker.reader.take(self._read(worker, worker.results)):
                sent += [message] if self._is_result(worker, json.loads(message)) else []
        except (ValueError, KeyError, TypeError, RecursionError, IndexError):
            is_broken = True
        frames.write_all(self.results, b"".join(map(frames.packed, sent)))
        self._fit_chunk(worker)
        if is_broken or worker.reader.is_broken:
            self._bury(worker, "wrote into the pipe of its results")
            return False
        return True

    def _read(self, worker: Worker, end: int) -> bytes:
        """Read a pipe, and listen no more at its end: the worker closed it, and will end."""
        data = worker.read(end)
        if data is None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(end)
        return data or b""

    def _is_result(self, worker: Worker, message: dict[str, Any]) -> bool:
        """Whether a message is the result of a sample, which is passed on as it is."""
        if "failed" in message:
            raise Failed(str(message["failed"]))
        worker.since = time.monotonic()
        if "ready" in message and not worker.is_ready:
            worker.is_ready, self.form = True, message["ready"]
            return False
        index = message["index"]
        if self.form is None or not (_is_at_once(self.form) or index == worker.pending[0]):
            raise ValueError(index)
        worker.pending.remove(index)
        if message.get("reason") == TIME_OUT and self._is_tried_again(index):
            return False
        self.num_left -= 1
        return True

    def _fit_chunk(self, worker: Worker) -> None:
        if worker.pending or not worker.is_ready:
            return
        seconds, (shortest, longest) = time.monotonic() - worker.given_at, CHUNK_S
        if seconds < shortest:
            worker.chunk = min(2 * worker.chunk, self.spec.max_chunk)
        elif seconds > longest:
            worker.chunk = max(1, worker.chunk // 2)

    def _take_output(self, worker: Worker) -> None:
        data = self._read(worker, worker.output)
        kept = data[: max(0, MAX_OUTPUT_BYTES - self.num_output)]
        self.num_output += len(data)
        with contextlib.suppress(OSError):
            os.write(2, kept)

    def _is_tried_again(self, index: int) -> bool:
        """Try a sample once more, without others. Returns False if it was already."""
        if index in self.tried_again:
            return False
        self.tried_again.add(index)
        self.alone.append(index)
        return True

    def _seconds_to_deadline(self) -> float | None:
        earliest = min([self.until, *(self._deadline(worker) for worker in self.workers.values() if not worker.is_idle)])
        return None if earliest == math.inf else max(0.0, earliest - time.monotonic())

    def _deadline(self, worker: Worker) -> float:
        if not worker.is_ready:
            return worker.since + START_TIMEOUT_S
        assert self.form is not None
        return worker.since + self.spec.timeout_s + (GRACE_S if self.form["is_async"] else 0.0)

    def _end_late_ones(self) -> None:
        """End the workers whose time is over. What they said until now was read before."""
        for worker in list(self.workers.values()):
            if worker.is_idle or time.monotonic() < self._deadline(worker):
                continue
            if not worker.is_ready:
                raise Failed(f"reward {self.spec.name!r} was not imported in {START_TIMEOUT_S:g} s{worker.place()}")
            self._bury(worker, f"gave no result in {self.spec.timeout_s:g} s{worker.place()}", TIME_OUT)

    def _give_up(self) -> None:
        """End the workers that are at work. What has no outcome is unjudged: the time of the job is over."""
        self.until = math.inf
        places: dict[int, str] = {}
        for worker in [each for each in self.workers.values() if each.pending]:
            places[worker.pending[0]] = worker.place()
            self.waiting.extend(worker.pending)
            worker.pending.clear()
            self._bury(worker)
        for index in (*self.waiting, *self.alone):
            self._leave_unjudged(index, TIME_OUT, f"had no result when reward.task_timeout_s was over{places.get(index, '')}")
        self.waiting.clear()
        self.alone.clear()

    def _leave_unjudged(self, index: int, reason: str, message: str) -> None:
        self.num_left -= 1
        frames.write(self.results, json.dumps({"index": index, **unjudged(reason, message)._asdict()}).encode())

    def _bury(self, worker: Worker, message: str = "", reason: str = DIED) -> None:
        """Take leave of a worker: what it had not finished goes to others, but for the sample that ended it."""
        for end in (worker.results, worker.output, worker.exit, *((worker.requests,) if worker.outgoing else ())):
            with contextlib.suppress(KeyError):
                self.selector.unregister(end)
        place = worker.shown_place()
        code = worker.end()
        if code == -signal.SIGXCPU and self.spec.cpu_s:
            message = f"used more than {self.spec.cpu_s} s of CPU time, which is reward.cpu_s{place}"
        del self.workers[worker.pid]
        end_orphans(set(self.workers))
        if not worker.is_ready:
            self.num_lost_starts += 1
            if code not in FROM_OUTSIDE or self.num_lost_starts > MAX_LOST_STARTS:
                raise Failed(f"reward {self.spec.name!r} ended its process while it was imported, {_of_code(code)}")
        pending, worker.pending = worker.pending, deque()
        if self.form is not None and _is_at_once(self.form) and len(pending) > 1:
            self.alone.extend(pending)
            self.tried_again.update(pending if reason == TIME_OUT else ())
        elif pending:
            first = pending.popleft()
            self.waiting.extendleft(reversed(pending))
            is_worth_it = reason == TIME_OUT or (not message and code in FROM_OUTSIDE)
            if not (is_worth_it and self._is_tried_again(first)):
                self._leave_unjudged(first, reason, message or f"ended its process, {_of_code(code)}")


def _is_at_once(form: dict[str, Any]) -> bool:
    return form["kind"] in ("batch", "trl") or bool(form["is_async"])


def _of_code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def main() -> None:
    requests, results = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (requests, results):
        os.set_inheritable(descriptor, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pool: Pool | None = None
    try:
        spec = Spec(**json.loads(frames.read(requests) or b"{}"))
        pool = Pool(spec, requests, results)
        while (head := frames.read(requests)) is not None:
            job = json.loads(head)
            tasks = [frames.read(requests) or b"" for _ in range(job["count"])]
            try:
                answer: dict[str, Any] = {"done": pool.do(tasks, job["limit_s"])}
            except Failed as error:
                answer = {"failed": str(error)}
            frames.write(results, json.dumps(answer).encode())
    except (EOFError, BrokenPipeError):
        pass  # the flow process is gone
    finally:
        if pool:
            pool.close()


if __name__ == "__main__":
    main()
