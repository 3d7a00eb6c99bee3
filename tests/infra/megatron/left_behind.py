"""A trainer that stays holds after each job what it held after the job before: no object, open file, thread or memory more.

Its resident set may grow all the same, because the C library's allocator keeps freed memory for later (docs/trainer.md has figures). So
memory is counted here after the allocator has returned what is free.

Run by test_left_behind.py in a process of its own: threads that other tests have left in theirs make objects too.
"""

import collections
import ctypes
import gc
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.megatron.__main__ import run
from infra.megatron.program.session import TrainerSession

pytestmark = pytest.mark.filterwarnings("ignore")  # pytest keeps each warning that it sees

Job = Callable[..., Any]
JOBS = 5
"""Number of jobs before the first count, in which caches fill, and between two counts. There are three counts, because what is loaded
late grows once, and a leak grows twice."""
NOISE_BYTES = 150_000
"""Growth of a job that does not count. Measured: 20,000 to 50,000 in each of the first hundred jobs of a process, 3,000 after two hundred.
The logits of one job's batch have 400,000 bytes."""


@dataclass(frozen=True)
class Held:
    """What this process holds after its garbage has been collected."""

    objects: collections.Counter[str]
    """Number of Python objects by the name of their type."""
    num_files: int
    num_threads: int
    num_bytes: int
    """Resident set without the memory that the allocator keeps for later."""

    def more_than(self, before: "Held") -> set[str]:
        """Return what grew with each of the jobs in between, by one or by NOISE_BYTES."""
        grown = dict(self.objects - before.objects) | {
            "open files": self.num_files - before.num_files,
            "threads": self.num_threads - before.num_threads,
            "memory": (self.num_bytes - before.num_bytes) // NOISE_BYTES,
        }
        return {what for what, count in grown.items() if count >= JOBS}


def held() -> Held:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Held(
        objects=collections.Counter(type(each).__name__ for each in gc.get_objects()),
        num_files=len(os.listdir("/proc/self/fd")),
        num_threads=len(os.listdir("/proc/self/task")),
        num_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


@pytest.fixture
def left_by_jobs(new_job: Job, make_batch: Job, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., set[str]]]:
    """Run 15 jobs in a program that stays, each going on from the one before; gives what grew with each of the last ten."""
    caplog.set_level(logging.ERROR, logger="infra")  # pytest keeps the records of a test
    session, batch, bad = TrainerSession(stays=True), make_batch(), make_batch()
    bad["tokens"][0] = 999

    def one(after: Any, sleep_weights: str, refused: bool) -> Any:
        made = new_job("qwen3-moe", after=after, batch=batch, sleep_weights=sleep_weights)
        assert run(made.path, session) == 0
        if refused:
            assert run(new_job("qwen3-moe", after=made, batch=bad, sleep_weights=sleep_weights).path, session) == 2
        return made

    def left(sleep_weights: str, refused: bool) -> set[str]:
        made, counts = None, list[Held]()
        for _ in range(3):
            for _ in range(JOBS):
                made = one(made, sleep_weights, refused)
            counts.append(held())
        first, second = (after.more_than(before) for before, after in pairwise(counts))
        return first & second

    yield left
    session.end()


@pytest.mark.parametrize("refused", [False, True], ids=["alone", "with a refused job after each"])
@pytest.mark.parametrize("sleep_weights", ["gpu", "host"])
def test_a_job_leaves_nothing_behind(sleep_weights: str, refused: bool, left_by_jobs: Callable[..., set[str]]) -> None:
    assert left_by_jobs(sleep_weights, refused) == set()


LEAKS: dict[str, Callable[[list[Any]], None]] = {
    "Tensor": lambda kept: kept.append(torch.zeros(1)),
    "open files": lambda kept: kept.append(os.open(os.devnull, os.O_RDONLY)),
    "memory": lambda kept: kept.append(ctypes.create_string_buffer(b"x" * 400_000, 400_000)),
}


@pytest.mark.parametrize("what", LEAKS)
def test_a_job_that_leaves_something_behind_is_found(
    what: str, left_by_jobs: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    clear = TrainerSession.teardown

    def leaking(session: TrainerSession) -> None:
        clear(session)
        LEAKS[what](kept)

    monkeypatch.setattr(TrainerSession, "teardown", leaking)
    found = left_by_jobs("host", False)
    for number in (each for each in kept if isinstance(each, int)):
        os.close(number)
    assert what in found
