"""Rows of questions and answers: generated, from the hub through `datasets`, or from local files.

The data set is shuffled once with the run's seed and repeated endlessly with another order each time round;
step k of a run takes the rows [k * n, (k+1) * n) of that sequence. No step has a row twice unless data.allow_repeats says so.
"""

import hashlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from infra.config import DataConfig, DataPart
from infra.config.tools.conditions import check_columns, condition_of
from infra.data import arithmetic
from infra.data.forms import overlap
from infra.data.forms.layouts import Layout, layout_of, row_of
from infra.data.forms.loading import load
from infra.data.forms.local_files import Table
from infra.data.forms.row import Row as Row
from infra.data.json_values import JSON
from infra.data.prompt_text import template_bytes

NUM_GENERATED_ROWS = 4096


class Loaded(NamedTuple):
    """A data set as it was read."""

    rows: tuple[Row, ...]
    """In the data set's own order."""
    layout: str
    """What was recognised, in one line."""
    num_filtered: int = 0
    """Rows that data.filter left out."""
    sizes: tuple[int, ...] = ()
    """Of several sources: how many rows each has. They stand one after the other."""


@cache
def loaded(config: DataConfig) -> Loaded:
    """Read a data set.

    Raises:
        ValueError: for a source that does not exist, a column or value that it lacks, a question that is neither text nor messages, an
            answer that is neither text, number nor bool, or no rows.
    """
    if parts := [loaded(part) for part in config.parts]:
        return Loaded(
            rows=tuple(row for part in parts for row in part.rows),
            layout="; ".join(f"{text}: {part.layout}" for text, part in zip(config.sources, parts, strict=True)),
            num_filtered=sum(part.num_filtered for part in parts),
            sizes=tuple(len(part.rows) for part in parts),
        )
    if config.source == "arithmetic":
        return Loaded(_generated(config), "generated word problems")
    tables = load(config)
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    layout = layout_of(config, names) if names else None
    kept = _Filter(config, names)
    found = tuple(row for table in tables for row in _rows_of(table, layout, config, kept)) if layout else ()
    if not layout or not (found or kept.num_left_out):
        raise ValueError(f"data set {config.source}, split {config.split!r}, is empty")
    if not found:
        raise ValueError(
            f"data.filter {' and '.join(map(repr, config.filter))} leaves none of {kept.num_left_out} rows of {config.source!r}"
        )
    return Loaded(found, layout.line(config.assistant_turn) + _num_continued(found), kept.num_left_out)


def rows(config: DataConfig) -> tuple[Row, ...]:
    """All rows of the data set, in its own order. Raises ValueError as loaded does."""
    return loaded(config).rows


def _generated(config: DataConfig) -> tuple[Row, ...]:
    if config.split not in ("train", "test"):
        raise ValueError(f"the generated data set 'arithmetic' has the splits train and test, not {config.split!r}")
    problems = arithmetic.problems("train" if config.split == "train" else "test", NUM_GENERATED_ROWS)
    return tuple(Row(problem["question"], problem["answer"], dict(problem)) for problem in problems)


class _Filter:
    """The conditions of data.filter, and how many rows did not meet them."""

    def __init__(self, config: DataConfig, names: Sequence[str]) -> None:
        self.conditions, self.num_left_out = [condition_of(text) for text in config.filter], 0
        check_columns(self.conditions, names)

    def keeps(self, row: dict[str, object]) -> bool:
        keeps = all(condition.holds(row) for condition in self.conditions)
        self.num_left_out += not keeps
        return keeps


def _rows_of(table: Table, layout: Layout, config: DataConfig, kept: _Filter) -> Iterator[Row]:
    for number, values in enumerate(zip(*table.columns.values(), strict=True)):
        row = dict(zip(table.columns, values, strict=True))
        try:
            if kept.keeps(row):
                yield row_of(row, layout, config)
        except ValueError as error:
            raise ValueError(f"{table.name}, row {number} (from 0): {error}") from error


def _num_continued(found: Sequence[Row]) -> str:
    """How many prompts end with the beginning of an answer: an easy mistake with data of whole conversations."""
    num = sum(row.chat is not None and row.chat.is_continued for row in found)
    return f"; {num} of {len(found)} rows end with the assistant's text, which the model continues" if num else ""


@cache
def part_rows(config: DataConfig) -> tuple[int, ...]:
    """The numbers of the rows that are meant: all, or those of a single file that are trained on or held out.

    Raises:
        ValueError: as rows does, or where no row could be held out.
    """
    found = rows(config)
    if not isinstance(config, DataPart):
        return tuple(range(len(found)))
    held_out = held_out_rows(config)
    if config.part == "held_out":
        if not held_out:
            why = "evaluation.every is 0" if not config.num_held_out else f"{len(found)} rows with too few different questions"
            raise ValueError(
                f"no row of the {'single data file' if config.is_single_file else 'data set'} {config.source!r} is held out ({why}), and the "
                "rows that are trained on are never asked: set evaluation.source to another data set"
            )
        return tuple(sorted(held_out))
    left_out = held_out | contaminated_rows(config)
    if len(left_out) == len(found):
        raise ValueError(
            f"all {len(found)} rows of data set {config.source!r} are asked by evaluations too, and such rows are not trained on: name another "
            "evaluation.source or evaluation.split, set data.hold_out, or take no evaluations (evaluation.every 0)"
        )
    return tuple(number for number in range(len(found)) if number not in left_out)


@cache
def held_out_rows(config: DataPart) -> frozenset[int]:
    """Rows of a hash's choice, which evaluations ask and training does not."""
    return frozenset() if config.part == "all" else frozenset(_held_out(rows(config), config.num_held_out, config.held_out_seed))


@cache
def contaminated_rows(config: DataPart) -> frozenset[int]:
    """Rows whose text, but for case and blanks, is in another data set that evaluations ask."""
    if not config.evaluated:
        return frozenset()
    asked = frozenset[str]().union(*map(question_digests, config.evaluated))
    return frozenset(number for number, row in enumerate(rows(config)) if question_digest(row.text) in asked)


def num_sharing_a_passage(config: DataPart) -> int:
    """Rows that are trained on and have 13 words in a row in common with what evaluations ask. 0 for generated data, whose wordings are few."""
    if config.source == "arithmetic":
        return 0
    found = rows(config)
    asked = [row for other in config.evaluated for row in rows(other)]
    asked += [found[number] for number in held_out_rows(config)]
    return overlap.num_sharing_a_passage((found[number].text for number in part_rows(config)), (row.text for row in asked))


def _held_out(found: Sequence[Row], num: int, seed: int) -> set[int]:
    """Rows of a hash's choice, min(num, a quarter of all) or as many as whole groups of equal questions allow."""
    most = min(num, max(1, len(found) // 4)) if len(found) > 1 else 0
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(found):
        groups.setdefault(question_digest(row.text), []).append(number)
    chosen: set[int] = set()
    for digest in sorted(groups, key=lambda digest: hashlib.sha256(f"{seed}/{digest}".encode()).digest()):
        if len(chosen) + len(groups[digest]) <= most:
            chosen.update(groups[digest])
    return chosen


@cache
def fingerprint(config: DataConfig) -> str:
    """SHA-256 over the rows that are meant with all their columns, in their own order, and over a template file."""
    found = rows(config)
    content = [_content_of(found[number], config) for number in part_rows(config)]
    template = [hashlib.sha256(template_bytes(config.template_file)).hexdigest()] if config.template_file else []
    return hashlib.sha256(json.dumps([*content, *template]).encode()).hexdigest()


def _content_of(row: Row, config: DataConfig) -> list[JSON]:
    """Everything of a row that prompts and rewards may use: the columns are told only where they say more than question and answer."""
    texts: list[JSON] = [row.question, row.answer]
    named: dict[str, JSON] = {config.question_column: row.question, config.answer_column: row.answer}
    return texts if row.columns in ({}, named) else [*texts, row.columns]


def question_digest(question: str) -> str:
    """Equal for questions that differ in case and blanks only."""
    return hashlib.sha256(" ".join(question.lower().split()).encode()).hexdigest()


@cache
def question_digests(config: DataConfig) -> frozenset[str]:
    """Digests of all questions of this part of the data set, as `question_digest` makes them."""
    found = rows(config)
    return frozenset(question_digest(found[number].text) for number in part_rows(config))


class Window(NamedTuple):
    """Positions of the drawn sequence among which no row may stand twice."""

    size: int
    is_aligned: bool = True
    """True: only windows that begin at a multiple of size count, as the prompts of a step do. False: any positions that follow each other."""

    @property
    def min_rows(self) -> int:
        """The fewest rows that fill a window without a repeat."""
        return self.size if self.is_aligned else 2 * (self.size - 1)

    def around(self, boundary: int) -> tuple[int, int]:
        """How many positions before and behind the boundary between two passes of the data share a window."""
        if not self.is_aligned:
            return self.size - 1, self.size - 1
        before = boundary % self.size
        return before, self.size - before if before else 0


def order(num_rows: int, start: int, count: int, seed: int, window: Window | None = None) -> list[int]:
    """Row numbers at the positions [start, start + count) of the endlessly repeated, each time reshuffled data set.

    window: Rows that would stand twice in a window that reaches over the end of a pass come later in the next pass; None: they may.
        Needs num_rows of window.min_rows or more.
    """
    drawn: list[int] = []
    for position in range(start, start + count):
        drawn.append(_pass_order(num_rows, position // num_rows, seed, window)[position % num_rows])
    return drawn


_ORDERS_LOCK = threading.Lock()
"""The next rollout may be prepared in a background thread during the step."""


def _pass_order(num_rows: int, number: int, seed: int, window: Window | None) -> list[int]:
    if window is None:
        return _shuffled(num_rows, number, seed)
    with _ORDERS_LOCK:
        orders = _orders(num_rows, seed, window)
        while len(orders) <= number:
            orders.append(
                _spaced(_shuffled(num_rows, len(orders), seed), orders[-1] if orders else [], window, len(orders) * num_rows)
            )
        return orders[number]


@cache
def _orders(num_rows: int, seed: int, window: Window) -> list[list[int]]:
    """The orders of the passes so far, to be appended to: each pass depends on the end of the one before."""
    return []


def _spaced(shuffled: list[int], previous: list[int], window: Window, boundary: int) -> list[int]:
    """The shuffled pass with the rows that end the previous one moved out of their common window; unchanged where none is in it."""
    num_before, num_behind = window.around(boundary)
    recent = set(previous[len(previous) - num_before :]) if previous else set()
    if recent.isdisjoint(shuffled[:num_behind]):
        return shuffled
    head = [row for row in shuffled if row not in recent][:num_behind]
    chosen = set(head)
    return head + [row for row in shuffled if row not in chosen]


@cache
def _shuffled(num_rows: int, number: int, seed: int) -> list[int]:
    rows = list(range(num_rows))
    random.Random(f"{seed}/{number}").shuffle(rows)
    return rows
