"""Turns on record, and their journal: a line for each complete turn, written before the agent gets its answer, two for a tool's call, and one for
each snapshot of an environment."""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.gateway.session.calls import CallRecord
from infra.gateway.session.snapshots import SnapshotRecord
from infra.records import FinishReason
from infra.store.journal import LineJournal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TurnRecord:
    """A complete turn: what was given before the answer, and the answer."""

    episode: str
    number: int
    """From 0, in the order in which the episode's turns were completed."""
    base: int | None
    """Number of the turn whose tokens come first, those of its answer last; None: this turn begins a sequence."""
    given_tokens: list[int]
    """Tokens between the two answers, or all before the first."""
    output_tokens: list[int]
    output_logprobs: list[float]
    """Nats, one a token of the answer."""
    finish_reason: FinishReason
    adapter_version: int
    adapter_sha256: str
    seed: int
    max_new_tokens: int
    """Longest answer that was allowed."""


class TurnJournal(LineJournal):
    """A context manager; an entry of the rollout's inputs key keeps turns of another adapter or configuration out."""

    def __init__(self, path: Path, fence: dict[str, str]) -> None:
        super().__init__(path, fence)
        self.records: dict[str, list[TurnRecord]] = {}
        """Turns of earlier attempts and of this one, by episode."""
        self.calls: dict[str, list[CallRecord]] = {}
        """Calls of tools, by episode; of one call the latest record is the last."""
        self.snapshots: dict[str, SnapshotRecord] = {}
        """The latest of each episode."""

    def go_on_with(
        self,
        turns: Mapping[str, Sequence[TurnRecord]],
        calls: Mapping[str, Sequence[CallRecord]],
        snapshots: Mapping[str, SnapshotRecord],
    ) -> None:
        """Take what the step before has on record, before this journal is opened. It is in a file of that step, and not written here."""
        self.records |= {name: [*records] for name, records in turns.items()}
        self.calls |= {name: [*records] for name, records in calls.items()}
        self.snapshots |= snapshots

    def _recover(self, lines: Sequence[dict[str, Any]]) -> Iterable[object]:
        found = [record_of_line(line) for line in lines]
        for record in found:
            self._keep(record)
        return [each for each in found if not isinstance(each, SnapshotRecord) or self.snapshots[each.episode] is each]

    def _left_out(self, lines: Sequence[dict[str, Any]]) -> None:
        found = {each.key: each for each in map(record_of_line, lines) if isinstance(each, CallRecord) and not each.is_idempotent}
        if found:
            names = ", ".join(sorted({call.name for call in found.values()}))
            log.warning(
                "%d calls of tools that are not idempotent (%s) were made by these episodes, which begin again: their effects may be made twice",
                len(found),
                names,
            )

    def _keep(self, record: TurnRecord | CallRecord | SnapshotRecord) -> None:
        if isinstance(record, SnapshotRecord):
            self.snapshots[record.episode] = record
        elif isinstance(record, CallRecord):
            self.calls.setdefault(record.episode, []).append(record)
        else:
            self.records.setdefault(record.episode, []).append(record)

    def add(self, record: TurnRecord) -> None:
        self.write(record)
        self._keep(record)

    def add_call(self, call: CallRecord) -> None:
        """Add a call before it is made, or its result before it is used. An effect that may not be made again is on the disk first."""
        self.write(call, syncs=call.is_open)
        self._keep(call)

    def add_snapshot(self, snapshot: SnapshotRecord) -> None:
        self.write(snapshot)
        self._keep(snapshot)

    def quarantine(self, reason: str) -> None:
        """Keep the file for diagnosis, but never resume from its turns: the engine that gave them answered wrongly. The calls had their effects,
        and stay on record."""
        self.__exit__(None, None, None)
        self._move(reason)
        self.records.clear()
        self.snapshots.clear()
        self._rewrite(call for calls in self.calls.values() for call in calls)


def tokens_digest(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids as int64, in hex."""
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()


def turn_id(prompt_digest: str, number: int) -> str:
    """Return a turn's id, unique in all sessions: 16 digits of the digest of its prompt's tokens, then its number."""
    return f"{prompt_digest[:16]}{number:04d}"


def record_of_line(line: dict[str, Any]) -> TurnRecord | CallRecord | SnapshotRecord:
    """Return the record of a line."""
    kind = CallRecord if "is_idempotent" in line else SnapshotRecord if "state" in line else TurnRecord
    return kind(**line)
