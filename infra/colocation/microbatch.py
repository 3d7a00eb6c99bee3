"""How many tokens a micro-batch of the trainer may have, where the configuration leaves it to the machine: as many as its GPU has room for.

    tokens = (room - margin - what is held) / (estimated bytes of a token x measured / estimated bytes)

An estimate sizes the first step. What each step took at its peak is remembered in the workspace, by model, adapter, layout and kind of GPU; so
later steps and runs correct the estimate. The size changes no result but by rounding, so it is no part of a training's identity.
"""

import hashlib
import json
import logging
from typing import NamedTuple

from pydantic import BaseModel

from infra.colocation.trainer_memory import Model, activation_bytes, held_bytes
from infra.config import TrainerConfig
from infra.machine import devices
from infra.store.files import read_note, write_note
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

GIB = 2**30
ESTIMATE_MARGIN_BYTES = 6 * GIB
"""Left free while only the estimate is known: it was up to 7 GiB below what was measured (30B-A3B, docs/colocation.md)."""
MEASURED_MARGIN_BYTES = 4 * GIB
"""Left free once a peak was measured: for CUDA's context and libraries, which the allocator does not count, and for uneven micro-batches."""
MOST_TOKENS = 65536
"""More gain nothing: from 32,768 to 49,152 tokens a step of 0.5B became 2 to 6% faster (H100, docs/results/speed.md)."""
STEP_TOKENS = 1024
"""Sizes are multiples of it, so that a little more or less memory does not change every micro-batch."""


class Size(NamedTuple):
    tokens: int
    reason: str
    """For the report: the size, and where it comes from."""


class Measured(BaseModel):
    """What training took at its peak, in the largest micro-batch so far; and what did not fit."""

    activation_bytes: float = 0.0
    estimated_bytes: float = 0.0
    did_not_fit: int | None = None
    """Tokens of the smallest micro-batch that ran out of memory."""


def largest(trainer: TrainerConfig, model: Model, *, room_bytes: int, longest: int) -> Size:
    """Return the largest micro-batch that fits into a GPU's room, but at least the longest sequence.

    room_bytes: What the colocation plan leaves to the trainer.
    """
    found = _remembered().get(_key(trainer, model), Measured())
    is_measured = found.estimated_bytes > 0
    correction = found.activation_bytes / found.estimated_bytes if is_measured else 1.0
    a_token = activation_bytes(trainer, model, num_rows=1, num_logits=1) * correction
    free = room_bytes - held_bytes(trainer, model) - (MEASURED_MARGIN_BYTES if is_measured else ESTIMATE_MARGIN_BYTES)
    tokens = min(int(free / a_token), MOST_TOKENS)
    why = f"{free / GIB:.1f} GiB for activations at {a_token / 2**20:.2f} MiB a token, {'as measured' if is_measured else 'as estimated'}"
    if tokens == MOST_TOKENS:
        why += f"; more than {MOST_TOKENS} gain nothing"
    if found.did_not_fit and tokens >= found.did_not_fit:
        tokens, why = found.did_not_fit // 2, f"half of {found.did_not_fit} tokens, which ran out of memory before"
    tokens = tokens // STEP_TOKENS * STEP_TOKENS
    if tokens < longest:
        tokens, why = longest, f"the longest sequence; {why}"
    return Size(tokens, f"{tokens} tokens: {why}")


def note_peak(trainer: TrainerConfig, model: Model, *, peak_gib: float, num_rows: int, num_logits: int) -> None:
    """Remember a step's peak, with the rows and loss tokens of its largest micro-batch."""
    notes, key = _remembered(), _key(trainer, model)
    before = notes.get(key, Measured())
    estimated, taken = (
        activation_bytes(trainer, model, num_rows=num_rows, num_logits=num_logits),
        peak_gib * GIB - held_bytes(trainer, model),
    )
    if estimated >= before.estimated_bytes and taken > 0:
        notes[key] = before.model_copy(update={"activation_bytes": taken, "estimated_bytes": estimated})
        _write(notes)


def note_out_of_memory(trainer: TrainerConfig, model: Model, *, tokens: int) -> None:
    """Remember that a micro-batch of as many tokens did not fit."""
    notes, key = _remembered(), _key(trainer, model)
    before = notes.get(key, Measured())
    smallest = min(tokens, before.did_not_fit or tokens)
    notes[key] = before.model_copy(update={"did_not_fit": smallest})
    _write(notes)


def _remembered() -> dict[str, Measured]:
    return read_note(Workspace.here().microbatches, dict[str, Measured]) or {}


def _write(notes: dict[str, Measured]) -> None:
    # Perf: synced, it waited 1.1 to 1.6 s behind a mixture's adapter of 5.9 GB (30B-A3B, H200, docs/results/speed.md).
    write_note(Workspace.here().microbatches, {key: note.model_dump() for key, note in notes.items()})


def _key(trainer: TrainerConfig, model: Model) -> str:
    """All that a step's memory depends on, but for the size of its micro-batches."""
    layout = ("num_processes", "tensor_parallel", "sequence_parallel", "expert_parallel", "dtype", "recompute")
    fields = {name: getattr(trainer, name) for name in layout} | {
        "rank": trainer.lora.rank,
        "targets": trainer.lora.target_modules,
    }
    described = json.dumps([fields, str(model), devices.processor()], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:32]
