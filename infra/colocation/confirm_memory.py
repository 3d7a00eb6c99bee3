"""Confirm by NVML that a release freed the memory: what may still be held, by which processes, and by when.

Without per-process figures (containers hide them) all of a GPU's use counts: then it must have come down by what the plan frees.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from infra.colocation.trainer_memory import MARGIN_BYTES, TRAINER_RESIDUE_BYTES
from infra.concurrency import polling
from infra.config import ColocationPlan
from infra.failures import EngineOutOfMemory, EngineUnavailable
from infra.machine import nvml
from infra.machine.nvml import GIB, Reading
from infra.processes import children

ROOM_DEADLINE_S = 60.0
"""Seconds to wait before the engine's launch or wake until the GPU has room."""
MIN_FREE_SHARE = 0.9
"""SGLang refuses to start a tensor-parallel engine below it, without saying which GPU it is."""


class Held(NamedTuple):
    """What an engine has on each GPU."""

    by_gpu: Mapping[int, int]
    is_attributed: bool
    """Whether NVML lists the engine's own processes. If not, the figures cover all processes."""


def held_by(program: str, reading: Reading | None = None, *, gpus: Sequence[int] = ()) -> Held:
    """program: the id that its processes carry. gpus: Those that it uses; none given: all may be its own."""
    reading = nvml.read() if reading is None else reading
    own = reading.of(children.of_program(reading.pids, program))
    if own or not reading.gpus:
        return Held(own, True)
    return Held({gpu.number: gpu.used_bytes for gpu in reading.gpus if not gpus or gpu.number in gpus}, False)


class Promise(NamedTuple):
    """What a plan comes to on each GPU."""

    plan: ColocationPlan
    left_bytes: int
    """At most this is left of the engine."""
    freed_bytes: int
    """At least this is taken away of it."""


def wait_until_released(program: str, before: Held, promise: Promise, *, timeout_s: float) -> Mapping[int, int]:
    """Wait until the engine has no more on each GPU than was promised; the bytes by which each GPU has more room then.

    before: What it had before the release.

    Raises:
        EngineUnavailable: past the deadline; says what is held, by whom, and what was to be expected.
    """
    allowed = {gpu: _allowed(promise, before, gpu) for gpu in before.by_gpu}
    begin = time.monotonic()
    while True:
        reading = nvml.read()
        now = _held_now(program, reading, before)
        over = {gpu: held for gpu, held in now.items() if held > allowed.get(gpu, promise.left_bytes + MARGIN_BYTES)}
        if not over:
            return {gpu: max(0, was - now.get(gpu, 0)) for gpu, was in before.by_gpu.items()}
        if time.monotonic() - begin > timeout_s:
            whose = "the engine" if before.is_attributed else "all processes together (the driver names none)"
            found = "; ".join(f"{held / GIB:.1f} GiB of GPU {gpu} ({reading.holders(gpu)})" for gpu, held in over.items())
            most = max(allowed.values(), default=promise.left_bytes + MARGIN_BYTES)
            raise EngineUnavailable(
                f"{timeout_s:g} s after the release by plan {promise.plan}, {whose} still has {found}; "
                f"at most {most / GIB:.1f} GiB may be left of it on each"
            )
        polling.pause(begin)


def _allowed(promise: Promise, before: Held, gpu: int) -> int:
    """Bytes that may be in use. If NVML lists no processes, others may hold what they held before, such as a trainer that sleeps on the GPU."""
    if before.is_attributed:
        return promise.left_bytes + MARGIN_BYTES
    with_a_sleeping_trainer = promise.left_bytes + TRAINER_RESIDUE_BYTES
    return max(with_a_sleeping_trainer, before.by_gpu[gpu] - promise.freed_bytes) + MARGIN_BYTES


def _held_now(program: str, reading: Reading, before: Held) -> Mapping[int, int]:
    if before.is_attributed:
        return reading.of(children.of_program(reading.pids, program))
    return {gpu.number: gpu.used_bytes for gpu in reading.gpus if gpu.number in before.by_gpu}


def wait_for_room(
    needed: Mapping[int, int], *, what: str, timeout_s: float, read: Callable[[], Reading] = lambda: nvml.read()
) -> None:
    """Wait until NVML reports the needed free bytes on each GPU: the trainer is off it.

    Raises:
        EngineOutOfMemory: past the deadline; says who has the memory.
    """
    begin = time.monotonic()
    while True:
        reading = read()
        short = [gpu for gpu in reading.gpus if gpu.free_bytes + MARGIN_BYTES < needed.get(gpu.number, 0)]
        if not short:
            return
        if time.monotonic() - begin > timeout_s:
            found = "; ".join(
                f"GPU {gpu.number} has {gpu.free_bytes / GIB:.1f} GiB free, needed are {needed[gpu.number] / GIB:.1f} "
                f"({reading.holders(gpu.number)})"
                for gpu in short
            )
            raise EngineOutOfMemory(f"{what}: after {timeout_s:g} s there is no room: {found}")
        polling.pause(begin)


def check_equal_memory(reading: Reading, gpus: list[int], *, is_allowed: bool) -> str | None:
    """Before a tensor-parallel engine starts: its ranks need equal room, the smallest bounds them all.

    Gives what is unequal, for people; None where all is equal.

    Raises:
        EngineUnavailable: where it is unequal and not allowed.
    """
    by_number = {gpu.number: gpu for gpu in reading.gpus}
    ranks = [by_number[number] for number in gpus if number in by_number]
    if len(ranks) < 2:
        return None
    most, least = (pick(gpu.free_bytes for gpu in ranks) for pick in (max, min))
    if least >= MIN_FREE_SHARE * most:
        return None
    rows = (
        f"rank {rank} on GPU {gpu.number}: {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free ({reading.holders(gpu.number)})"
        for rank, gpu in enumerate(ranks)
    )
    message = f"the GPUs of this tensor-parallel engine have unequal room: {'; '.join(rows)}"
    if not is_allowed:
        raise EngineUnavailable(f"{message}. Free the fuller ones, or set engine.allow_unequal_memory")
    return message
