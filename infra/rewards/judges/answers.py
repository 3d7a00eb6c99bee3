"""Parse a judge's answer. An answer of another form than the request names is an error, never a score."""

import json
import math
import re
from typing import Any

THOUGHTS_BEGIN, THOUGHTS_END = "<think>", "</think>"
THOUGHTS = re.compile(f"{THOUGHTS_BEGIN}.*?{THOUGHTS_END}", re.DOTALL)
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)
SHOWN_CHARACTERS = 120


def json_in(answer: str) -> dict[str, Any]:
    """Return the JSON object that an answer is, alone or as its only code block. Thoughts before it are left out.

    Raises:
        ValueError: for an answer that is something else.
    """
    text = THOUGHTS.sub("", answer).strip()
    blocks = FENCED.findall(text)
    try:
        found = json.loads(blocks[0] if len(blocks) == 1 else text)
    except ValueError:
        raise ValueError(f"it is no JSON: {shown(answer)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is no JSON object: {shown(answer)}")
    return found


def matched(pattern: str, answer: str) -> str:
    """Return the first group of the only match of a pattern. Thoughts are left out, also where their beginning stands in the judge's prompt and
    where they do not end. Raises ValueError if it does not match, or several times."""
    said = THOUGHTS.sub("", answer).rpartition(THOUGHTS_END)[2].partition(THOUGHTS_BEGIN)[0]
    found = list(re.finditer(pattern, said))
    if len(found) != 1:
        raise ValueError(f"reward.judge.score_pattern matches it {len(found)} times: {shown(answer)}")
    return found[0].group(1) or ""


def score_of(value: object, low: float, high: float) -> float:
    """Return a score. Raises ValueError for what is no number, and for a number outside of the range."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"its score is {shown(str(value))}, which is no number")
    if not low <= number <= high:
        raise ValueError(f"its score {number:g} is not from {low:g} to {high:g}")
    return number


def number_in(text: str) -> float | str:
    """Return text as a number, or as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")
