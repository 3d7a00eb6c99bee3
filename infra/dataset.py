"""Rows of questions and answers: generated, from the hub through `datasets`, or from local files.

The data set is shuffled once with the run's seed and repeated endlessly with another order each time round;
step k of a run takes the rows [k * n, (k+1) * n) of that sequence.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from infra import arithmetic, progress
from infra.config import DataConfig
from infra.data_files import Table, read_tables

NUM_GENERATED_ROWS = 4096


class Row(NamedTuple):
    question: str
    answer: str


@cache
def rows(config: DataConfig) -> tuple[Row, ...]:
    """All rows of the data set, in its own order.

    Raises:
        ValueError: for a source that does not exist, a column or value that it lacks, a question that is not text, an answer that is
            neither text, number nor bool, or no rows.
    """
    if config.source == "arithmetic":
        if config.split not in ("train", "test"):
            raise ValueError(f"the generated data set 'arithmetic' has the splits train and test, not {config.split!r}")
        problems = arithmetic.problems("train" if config.split == "train" else "test", NUM_GENERATED_ROWS)
        return tuple(Row(**problem) for problem in problems)
    tables = _load(config)
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    if names and (missing := [column for column in _columns_of(config) if column not in names]):
        raise ValueError(f"data set {config.source!r} has no column {missing[0]!r}; it has {', '.join(names)}")
    found = tuple(row for table in tables for row in _rows_of(table, config))
    if not found:
        raise ValueError(f"data set {config.source}, split {config.split!r}, is empty")
    return found


def _columns_of(config: DataConfig) -> tuple[str, str]:
    return config.question_column, config.answer_column


def _load(config: DataConfig) -> list[Table]:
    path = Path(config.source).expanduser()
    if path.exists():
        return read_tables(path, config.split, _columns_of(config))
    if config.source.startswith((".", "/", "~")) or config.source.count("/") != 1:
        raise ValueError(
            f"data set {config.source!r} does not exist; give a local file or folder, a hub id such as openai/gsm8k, or 'arithmetic'"
        )
    import datasets

    try:
        with progress.work(f"fetching the data set {config.source}", has_bar=True):
            found = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data set {config.source!r} is neither a local path nor to be had from the hub: {error}") from error
    columns = {name: list(found[name]) for name in _columns_of(config) if name in found.column_names}
    return [Table(f"data set {config.source!r}, split {config.split!r}", found.column_names, columns)]


def _rows_of(table: Table, config: DataConfig) -> Iterator[Row]:
    num_rows = len(next(iter(table.columns.values()), []))
    questions, answers = (table.columns.get(column, [None] * num_rows) for column in _columns_of(config))
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        try:
            yield Row(_question_text(question, config.question_column), _answer_text(answer, config.answer_column))
        except ValueError as error:
            raise ValueError(f"{table.name}, row {number} (from 0): {error}") from error


def _question_text(value: object, column: str) -> str:
    if value is None:
        raise ValueError(f"it has no {column!r}")
    if not isinstance(value, str):
        raise ValueError(
            f"the question (column {column!r}) is {_kind(value)}, not text: give each question as one text; lists of chat messages "
            "are not supported"
        )
    return value


def _answer_text(value: object, column: str) -> str:
    """The canonical text of an answer: text as it stands; an integer, a float or a bool as JSON writes it (42, 0.5, true)."""
    if value is None:
        raise ValueError(f"it has no {column!r}")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return json.dumps(value)
    kind = f"the float {value}" if isinstance(value, float) else _kind(value)
    raise ValueError(f"the answer (column {column!r}) is {kind}: it must be text, a finite number, or true or false")


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@cache
def fingerprint(config: DataConfig) -> str:
    """SHA-256 over all rows in their own order."""
    return hashlib.sha256(json.dumps(rows(config)).encode()).hexdigest()


def question_digest(question: str) -> str:
    """Equal for questions that differ in case and blanks only."""
    return hashlib.sha256(" ".join(question.lower().split()).encode()).hexdigest()


@cache
def question_digests(config: DataConfig) -> frozenset[str]:
    return frozenset(question_digest(row.question) for row in rows(config))


def order(num_rows: int, start: int, count: int, seed: int) -> list[int]:
    """Row numbers at the positions [start, start + count) of the endlessly repeated, each time reshuffled data set."""
    drawn: list[int] = []
    for position in range(start, start + count):
        drawn.append(_epoch_order(num_rows, position // num_rows, seed)[position % num_rows])
    return drawn


@cache
def _epoch_order(num_rows: int, epoch: int, seed: int) -> list[int]:
    shuffled = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(shuffled)
    return shuffled
