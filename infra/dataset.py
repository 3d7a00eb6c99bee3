"""Rows of questions and answers: generated, from the hub, or from a local file, through `datasets`.

The data set is shuffled once with the run's seed and repeated endlessly with another order each time round;
step k of a run takes the rows [k * n, (k+1) * n) of that sequence.
"""

import hashlib
import json
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

from infra import arithmetic, progress
from infra.config import DataConfig

NUM_GENERATED_ROWS = 4096


class Row(NamedTuple):
    question: str
    answer: str


@cache
def rows(config: DataConfig) -> tuple[Row, ...]:
    """All rows of the data set, in its own order.

    Raises:
        ValueError: for a source that does not exist, a column or value that it lacks, or no rows.
    """
    if config.source == "arithmetic":
        if config.split not in ("train", "test"):
            raise ValueError(f"the generated data set 'arithmetic' has the splits train and test, not {config.split!r}")
        problems = arithmetic.problems("train" if config.split == "train" else "test", NUM_GENERATED_ROWS)
        return tuple(Row(**problem) for problem in problems)
    found = _load(config)
    for column in (config.question_column, config.answer_column):
        if column not in found.column_names:
            raise ValueError(f"data set {config.source!r} has no column {column!r}; it has {', '.join(found.column_names)}")
    questions, answers = list(found[config.question_column]), list(found[config.answer_column])
    if not questions:
        raise ValueError(f"data set {config.source!r}, split {config.split!r}, is empty")
    for column, values in ((config.question_column, questions), (config.answer_column, answers)):
        if None in values:
            raise ValueError(f"data set {config.source!r}: row {values.index(None)} has no {column!r}")
    return tuple(Row(str(question), str(answer)) for question, answer in zip(questions, answers, strict=True))


def _load(config: DataConfig):  # type: ignore[no-untyped-def]  # datasets.Dataset, whose import costs a second
    import datasets

    path = Path(config.source).expanduser()
    if path.exists():
        try:
            return _load_local(path, config.split)
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(f"data set {config.source!r} cannot be read: {error.__cause__ or error}") from error
    if config.source.startswith((".", "/", "~")) or config.source.count("/") != 1:
        raise ValueError(
            f"data set {config.source!r} does not exist; give a local file or folder, a hub id such as openai/gsm8k, or 'arithmetic'"
        )
    try:
        with progress.work(f"fetching the data set {config.source}", has_bar=True):
            return datasets.load_dataset(config.source, config.subset, split=config.split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data set {config.source!r} is neither a local path nor to be had from the hub: {error}") from error


def _load_local(path: Path, split: str):  # type: ignore[no-untyped-def]  # as _load
    import datasets

    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.stem.startswith(split) and file.suffix in (".jsonl", ".json", ".parquet")
        )
        if not files:
            raise ValueError(f"data folder {path} has no {split}*.jsonl and no {split}*.parquet")
    else:
        files = [path]
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(files[0].suffix)
    if kind is None:
        raise ValueError(f"data file {files[0]} is neither .jsonl nor .parquet")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"data set {path}, split {split!r}, is empty")
    return datasets.load_dataset(kind, data_files=[str(file) for file in files], split="train")


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
