"""What judges have answered, by the digest of the request, and what was paid: one file for all runs of a workspace.

An answer is written as soon as it comes, before anything is made of it. So nothing that was paid is paid again: not by the next attempt
after a kill, not by an evaluation that asks the same, not by a replay. A power cut may cost the answers of its last moments.

What a step or an evaluation paid is beside its other files too, in paid.jsonl: a machine that continues the run from a store reads it there.
"""

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import orjson

from infra.rewards.judges.cases import JudgeAnswer
from infra.store.layout import Workspace

TABLES = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS payments (run TEXT NOT NULL, work TEXT NOT NULL, key TEXT NOT NULL, at REAL NOT NULL,
    input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS payments_of_run ON payments (run, work);
"""
PAID = ("key", "at", "text", "finish_reason", "input_tokens", "output_tokens")
"""Fields of a paid answer in a file of its own."""
LOCK_TIMEOUT_S = 60.0
"""Another process may write at the moment."""


def step_work(index: int) -> str:
    """Name what is judged of a step."""
    return f"step {index}"


def evaluation_work(version: int) -> str:
    """Name what is judged of an adapter's evaluations."""
    return f"evaluation {version}"


class Spent(NamedTuple):
    requests: int
    input_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def cost(self, input_price: float, output_price: float) -> float:
        """Return the cost, by prices for a million tokens."""
        return (self.input_tokens * input_price + self.output_tokens * output_price) / 1e6


class Ledger:
    """A context manager."""

    def __init__(self, path: Path | None = None) -> None:
        """path: None: that of the workspace."""
        self.path = path or Workspace.here().judgements

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute(
            "PRAGMA synchronous=NORMAL"
        )  # survives the end of this process; the disk is awaited at checkpoints only
        self._file.executescript(TABLES)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def found(self, keys: Iterable[str]) -> dict[str, JudgeAnswer]:
        """Return the answers to requests, by their keys, as far as there are any."""
        query = "SELECT text, finish_reason, input_tokens, output_tokens FROM answers WHERE key = ?"
        rows = {key: self._file.execute(query, (key,)).fetchone() for key in keys}
        return {key: JudgeAnswer(*row) for key, row in rows.items() if row}

    def add(self, run: str, work: str, key: str, answer: JudgeAnswer) -> None:
        """Record an answer and its payment. work: What of the run it was for, such as `step 3`."""
        tokens = (answer.input_tokens, answer.output_tokens)
        self._file.execute("BEGIN IMMEDIATE")
        self._file.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", (key, answer.text, answer.finish_reason, *tokens)
        )
        self._file.execute("INSERT INTO payments VALUES (?, ?, ?, ?, ?, ?)", (run, work, key, time.time(), *tokens))
        self._file.execute("COMMIT")

    def paid(self, run: str, work: str) -> bytes:
        """Return the answers that one work of a run has paid, a JSON line each, in their order. Answers that come later only add lines."""
        query = (
            "SELECT key, at, text, finish_reason, payments.input_tokens, payments.output_tokens FROM payments JOIN answers USING (key) "
            "WHERE run = ? AND work = ? ORDER BY payments.rowid"
        )
        lines = (dict(zip(PAID, row, strict=True)) for row in self._file.execute(query, (run, work)))
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def take_over(self, run: str, work: str, paid: bytes) -> int:
        """Record what another workspace has paid, as `paid` gives it. Returns the number of payments that were not known here.

        Raises:
            ValueError: for content of another form; nothing is recorded.
        """
        try:
            rows = [tuple(line[name] for name in PAID) for line in map(orjson.loads, paid.splitlines())]
        except (KeyError, TypeError, orjson.JSONDecodeError) as error:
            raise ValueError(f"the paid answers of {work} of run {run!r} cannot be read: {error!r}") from error
        self._file.execute("BEGIN IMMEDIATE")
        known = set(self._file.execute("SELECT key, at FROM payments WHERE run = ? AND work = ?", (run, work)))
        new = [row for row in rows if row[:2] not in known]
        for key, at, text, finish_reason, *tokens in new:
            self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", (key, text, finish_reason, *tokens))
            self._file.execute("INSERT INTO payments VALUES (?, ?, ?, ?, ?, ?)", (run, work, key, at, *tokens))
        self._file.execute("COMMIT")
        return len(new)

    def forget(self, run: str) -> None:
        """Forget what a run that was removed has paid: another run of its name has a budget of its own. Its answers stay."""
        self._file.execute("DELETE FROM payments WHERE run = ?", (run,))

    def spent(self, run: str, work: str | None = None) -> Spent:
        """Return what a run has paid, or one work of it."""
        query = (
            "SELECT count(*), total(input_tokens), total(output_tokens) FROM payments WHERE run = ? AND (? IS NULL OR work = ?)"
        )
        return Spent(*map(int, self._file.execute(query, (run, work, work)).fetchone()))
