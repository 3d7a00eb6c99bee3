"""Read local data files: JSON lines, one JSON list, or Parquet; a file alone or those of one split in a folder."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from infra.config.sections.data import FILE_KINDS


class Table(NamedTuple):
    """The columns of one file, or of one split from the hub."""

    name: str
    """As an error names it, such as "data file train.jsonl"."""
    columns: dict[str, list[Any]]
    """All of one length. A value that a row lacks is None."""


def read_tables(path: Path, split: str) -> list[Table]:
    """Read a data file, or the files of a split in a folder, one table each.

    Raises:
        ValueError: for a missing split, a file of another kind, or one that cannot be read.
    """
    files = _files_of(path, split)
    kinds = {file.suffix for file in files}
    if not kinds <= set(FILE_KINDS):
        raise ValueError(f"data file {files[0]} is neither .jsonl nor .parquet")
    if len(kinds) > 1 and ".parquet" in kinds:
        raise ValueError(f"data folder {path}, split {split!r}, has files of several kinds: {', '.join(sorted(kinds))}")
    return [_parquet_table(file) if file.suffix == ".parquet" else _json_table(file) for file in files]


def _files_of(path: Path, split: str) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data folder {path} does not exist: data.subset names a folder in data.source")
    if not path.is_dir():
        return [path]
    # train.jsonl, train-00000-of-00002.parquet, train_1.jsonl; not train_unfiltered.jsonl, nor training.jsonl.
    name = re.compile(rf"{re.escape(split)}([-._]?[0-9].*)?")
    files = sorted(file for file in path.iterdir() if file.suffix in FILE_KINDS and name.fullmatch(file.stem))
    if not files:
        raise ValueError(
            f"data folder {path} has no {split}.jsonl and no {split}.parquet (or {split}-00000-of-00002.parquet, say)"
        )
    return files


def _parquet_table(file: Path) -> Table:
    try:
        with pq.ParquetFile(file) as source:
            columns = source.read().to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise ValueError(f"data file {file} cannot be read: {' '.join(str(error).split())}") from error
    return Table(f"data file {file}", columns)


def _json_table(file: Path) -> Table:
    rows = _json_rows(file)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(f"data file {file}", {name: [row.get(name) for row in rows] for name in names})


def _json_rows(file: Path) -> list[dict[str, Any]]:
    """Read JSON lines, or one JSON list. Not through `datasets`, which takes a column of text that looks like dates for dates, and 42 beside
    3.5 for 42.0."""
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
