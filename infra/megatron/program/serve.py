"""The persistent trainer: it runs one job after another and leaves the GPU between them.

It communicates through files only; see infra.megatron.protocol.mailbox. A job runs exactly as in the one-shot program and leaves the same
files. An unexpected error ends the program, as it ends the one-shot program. It also ends when its owner is gone and no other owner has
registered. So it never has to repair its own state.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from infra.megatron.model import attention
from infra.megatron.program.session import Asleep, TrainerSession
from infra.megatron.protocol.mailbox import Mailbox, QueuedJob, State
from infra.processes import children

log = logging.getLogger(__name__)

EAGER_POLL_S, IDLE_POLL_S = 0.005, 0.05
EAGER_FOR_S = 3.0
"""A rank polls for its next job every EAGER_POLL_S during its first EAGER_FOR_S of waiting, then every IDLE_POLL_S. 200 polls a second
take 4 to 6% of a core."""
WATCH_S = 0.5


class Signals:
    """SIGTERM during a job ends the program at once and leaves the job's files unfinished. Between jobs it only requests the end."""

    def __init__(self) -> None:
        self.asked_to_end, self.busy = False, False
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.busy:
            os._exit(128 + number)
        self.asked_to_end = True


def serve(folder: Path, run: Callable[[Path, TrainerSession | None], int]) -> int:
    """Run jobs from the queue until the end is requested. Returns the exit code."""
    box, session, signals, rank = Mailbox(folder), TrainerSession(stays=True), Signals(), int(os.environ.get("RANK", "0"))
    box.enter(rank, children.ref_of(os.getpid()))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    attention.load_ahead()  # while the engine starts
    number, code, asleep = 0, 0, Asleep(0, 0.0)
    while True:
        if rank == 0:
            box.publish_state(State(num_done=number, exit_code=code, held_bytes=asleep.held_bytes, sleep_s=asleep.seconds))
            order = _next_job(box, number + 1, signals)
            box.put("turns", number + 1, order)
        else:
            order = _next_turn(box, number + 1, signals)
        if order.job is None:
            break
        signals.busy = True
        code = run(order.job, session)
        asleep = session.sleep()
        signals.busy = False
        number += 1
        log.info("asleep after %.1f s, %.1f GiB of the device held", asleep.seconds, asleep.held_bytes / 2**30)
    session.end()
    return 0


def _next_job(box: Mailbox, number: int, signals: Signals) -> QueuedJob:
    """Return the next job. Rank 0 decides for all ranks."""
    gone_since: float | None = None
    began, next_look = time.monotonic(), 0.0
    while not (signals.asked_to_end or box.is_asked_to_stop()):
        if order := box.get("jobs", number):
            return order
        if (now := time.monotonic()) >= next_look:
            next_look, owner = now + WATCH_S, box.owner()
            gone_since = None if children.find(owner.process) else gone_since or now
            if gone_since and now - gone_since >= owner.grace_s:
                log.info("the owner is gone: ending")
                break
        _pause(now - began)
    return QueuedJob(job=None)


def _next_turn(box: Mailbox, number: int, signals: Signals) -> QueuedJob:
    began = time.monotonic()
    while not signals.asked_to_end:
        if order := box.get("turns", number):
            return order
        _pause(time.monotonic() - began)
    return QueuedJob(job=None)


def _pause(waited_s: float) -> None:
    """Sleep until the next poll. The interval grows with the time waited."""
    time.sleep(EAGER_POLL_S if waited_s < EAGER_FOR_S else IDLE_POLL_S)


def _end_with(parent: int) -> None:
    """End this rank with its parent. torchrun's ranks outlive a killed torchrun; this one ends even in the middle of a job."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
