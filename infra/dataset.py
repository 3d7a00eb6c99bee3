"""Rows of questions and answers: generated, from the hub, or from a local file, through `datasets`.

The data set is shuffled once with the run's seed and repeated endlessly with another order each time round;
step k of a run takes the rows [k * n, (k+1) * n) of that sequence.
"""

import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from infra import arithmetic, progress
from infra.config import DataConfig

NUM_GENERATED_ROWS = 4096
KINDS = (".jsonl", ".json", ".parquet")
"""Of local files."""


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


class Columns(dict[str, list[Any]]):
    """As much of a datasets.Dataset as is needed here."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


def _load(config: DataConfig):  # type: ignore[no-untyped-def]  # Columns, or datasets.Dataset, whose import costs a second
    path = Path(config.source).expanduser()
    if path.exists():
        return _load_local(path, config.split)
    if config.source.startswith((".", "/", "~")) or config.source.count("/") != 1:
        raise ValueError(
            f"data set {config.source!r} does not exist; give a local file or folder, a hub id such as openai/gsm8k, or 'arithmetic'"
        )
    import datasets

    try:
        with progress.work(f"fetching the data set {config.source}", has_bar=True):
            return datasets.load_dataset(config.source, config.subset, split=config.split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data set {config.source!r} is neither a local path nor to be had from the hub: {error}") from error


def _load_local(path: Path, split: str):  # type: ignore[no-untyped-def]  # as _load
    if path.is_dir():
        # train.jsonl, train-00000-of-00002.parquet, train_1.jsonl; not train_unfiltered.jsonl, nor training.jsonl.
        name = re.compile(rf"{re.escape(split)}([-._]?[0-9].*)?")
        files = sorted(file for file in path.iterdir() if file.suffix in KINDS and name.fullmatch(file.stem))
        if not files:
            raise ValueError(
                f"data folder {path} has no {split}.jsonl and no {split}.parquet (or {split}-00000-of-00002.parquet, say)"
            )
    else:
        files = [path]
    kinds = {file.suffix for file in files}
    if not kinds <= set(KINDS):
        raise ValueError(f"data file {files[0]} is neither .jsonl nor .parquet")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"data set {path}, split {split!r}, is empty")
    if ".parquet" not in kinds:
        return _columns([row for file in files for row in _json_rows(file)])
    if len(kinds) > 1:
        raise ValueError(f"data folder {path}, split {split!r}, has files of several kinds: {', '.join(sorted(kinds))}")
    import datasets

    try:
        return datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"data set {str(path)!r} cannot be read: {error.__cause__ or error}") from error


def _json_rows(file: Path) -> list[dict[str, Any]]:
    """Of JSON lines, or of one list. Read here: `datasets` takes a column of text that looks like dates for dates, and 42 beside 3.5 for 42.0."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data file {file} cannot be read: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    is_list = text.lstrip().startswith("[")
    found = []
    for number, line in enumerate([text] if is_list else text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"data file {file} cannot be read: line {number if not is_list else error.lineno} is no JSON: {error.msg}"
            ) from error
    rows = found[0] if is_list else found
    if wrong := [row for row in rows if not isinstance(row, dict)]:
        raise ValueError(
            f"data file {file} cannot be read: a row must be an object with columns, not {json.dumps(wrong[0])[:60]}"
        )
    return list(rows)


def _columns(rows: list[dict[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    return Columns({name: [row.get(name) for row in rows] for name in names})


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
