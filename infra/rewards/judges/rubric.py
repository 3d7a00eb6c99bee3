"""A rubric: a template that is filled with each sample, and the score that its judge gives."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from infra.config import JudgeConfig
from infra.rewards.judges.answers import json_in, matched, number_in, score_of
from infra.rewards.judges.cases import Case, Schema
from infra.rewards.signatures import Fields

PLACE = re.compile(r"\{\{|\}\}|\{(question|answer|completion)\}|\{row\[([^\]{}]+)\]\}|[{}]")
KNOWN = "{question}, {answer}, {completion} and {row[COLUMN]}"
TAKES = ("completion", "question", "answer", "row")
"""Fields of a sample that a rubric may use."""
INSTRUCTION = 'Answer with one JSON object and nothing after it: {{"reasoning": "...", "score": N}}. N is a number from {low:g} to {high:g}.'


def text_of(config: JudgeConfig) -> str:
    """Return the rubric, from its file if it is one. Raises ValueError for a file that cannot be read."""
    path = config.rubric_file
    if path is None:
        return config.rubric
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(
            f"reward.judge.rubric {str(path)!r} cannot be read ({why}): give a text, or a file that exists"
        ) from error


def check(template: str) -> set[str]:
    """Return the columns of the row that a template uses.

    Raises:
        ValueError: for a place that is unknown, and for a template without the completion.
    """
    columns, names = set(), set()
    for place in PLACE.finditer(template):
        if place.group() in ("{", "}"):
            raise ValueError(
                f"reward.judge.rubric has a brace that begins or ends no place, at {template[place.start() :][:40]!r}: known are {KNOWN}; "
                "double the braces that are text"
            )
        names.add(place.group(1))
        columns |= {place.group(2)} - {None}
    if "completion" not in names:
        raise ValueError("reward.judge.rubric has no {completion}: the judge would not see what it judges")
    return columns


def takes_answer(template: str) -> bool:
    """Whether a template has the row's answer in it."""
    return any(place.group(1) == "answer" for place in PLACE.finditer(template))


def filled(template: str, sample: Fields) -> str:
    """Fill a template with a sample. Raises ValueError for a column that the row lacks."""

    def value(place: "re.Match[str]") -> str:
        if place.group() in ("{{", "}}"):
            return place.group()[0]
        if name := place.group(1):
            return str(sample[name])
        return _text(sample["row"], place.group(2))

    return PLACE.sub(value, template)


def _text(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise ValueError(f"reward.judge.rubric uses {{row[{column}]}}, and the row has {', '.join(row) or 'no columns'}")
    return row[column] if isinstance(row[column], str) else json.dumps(row[column], ensure_ascii=False)


def case_of(config: JudgeConfig, template: str, index: int, sample: Fields) -> Case:
    """Return the request for one sample. With a pattern the rubric alone says how to answer."""
    text = filled(template, sample)
    if not config.score_pattern:
        text += "\n\n" + INSTRUCTION.format(low=config.min_score, high=config.max_score)
    return Case((index,), [{"role": "user", "content": text}], _schema(config), _reader(config))


def _schema(config: JudgeConfig) -> Schema | None:
    if config.score_pattern:
        return None
    properties = {
        "reasoning": {"type": "string"},
        "score": {"type": "number", "description": f"from {config.min_score:g} to {config.max_score:g}"},
    }
    of_answer = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"name": "judgement", "schema": of_answer}


def _reader(config: JudgeConfig) -> Callable[[str], list[float]]:
    low, high, pattern = config.min_score, config.max_score, config.score_pattern

    def read(answer: str) -> list[float]:
        value = number_in(matched(pattern, answer)) if pattern else json_in(answer).get("score")
        return [score_of(value, low, high)]

    return read
