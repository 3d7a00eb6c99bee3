"""What a call of a reward came to: a finite number with named parts, or unjudged with a reason.

Unjudged is a value of its own: it is never 0 and never NaN.
"""

import inspect
import math
import os
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infra.store.installed import is_installed

WHOLE_REWARD = "reward"
"""As infra.store.samples has it: the only part of a reward that returns a plain number. In a dict it is the reward itself."""
TIME_OUT, EXCEPTION, DIED, NONE, NO_NUMBER = "time-out", "exception", "died", "returned None", "no number"
JUDGE_UNAVAILABLE, JUDGE_UNREADABLE, ALONE = "judge unavailable", "judge unreadable", "nothing to compare with"
TOO_LONG = "too long"
"""Here and above: why a sample is unjudged."""
PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .:-]{0,63}")
"""Valid name of a part of a reward. It becomes part of a metric's name."""
MAX_PARTS = 100
SHOWN_CHARACTERS = 200
MAX_ERROR_CHARACTERS = 500
OUR_FOLDER = os.path.dirname(__file__)
ENVIRONMENTS = Path(OUR_FOLDER).with_name("environments")
EXAMPLES = f"{ENVIRONMENTS / 'examples'}{os.sep}"
"""The environments' examples are read as a user's."""
OURS = (f"{OUR_FOLDER}{os.sep}", f"{ENVIRONMENTS}{os.sep}", "<")
"""Beginnings of the names of other files that are no user's."""


class Outcome(NamedTuple):
    reward: float | None
    """None: unjudged."""
    parts: dict[str, float] | None = None
    reason: str = ""
    """Why it is unjudged, such as TIME_OUT; empty if it is judged."""
    message: str = ""
    """What happened, with the place in the user's file, in one line."""


def unjudged(reason: str, message: str) -> Outcome:
    """Return the outcome of a sample without a reward. reason: one of those above."""
    return Outcome(None, None, reason, message)


def of_error(error: BaseException) -> Outcome:
    """Return the outcome of an error that a user's function raised."""
    return unjudged(EXCEPTION, f"raised {said(error)}{place(error)}")


def of_value(value: object, weights: Mapping[str, float], function: object) -> Outcome:
    """Return the outcome of a return value: a number, a bool, a numpy scalar, or a dict of them by name.

    weights: Weights of parts, for a dict without the key `reward` that has all of them; 1 where a part has none.
    """
    if value is None:
        return unjudged(NONE, f"returned None{place_of_function(function)}")
    try:
        return Outcome(*_whole(parts_of(value), weights))
    except ValueError as error:
        return unjudged(NO_NUMBER, f"{' '.join(str(error).split())}{place_of_function(function)}")


def _whole(parts: dict[str, float], weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    if weights and WHOLE_REWARD in parts:
        raise ValueError(
            f"returned a whole reward, and reward.functions has weights of its parts {', '.join(weights)}: leave one out"
        )
    if missing := [name for name in weights if name not in parts]:
        raise ValueError(f"returned the parts {', '.join(parts)}, and reward.functions has a weight of the part {missing[0]!r}")
    if WHOLE_REWARD in parts:
        others = {name: value for name, value in parts.items() if name != WHOLE_REWARD}
        return parts[WHOLE_REWARD], others or parts
    total = sum(value * weights.get(name, 1.0) for name, value in parts.items())
    if not math.isfinite(total):
        raise ValueError(f"returned parts whose sum is {total}: a finite number is needed")
    return total, parts


def parts_of(value: object) -> dict[str, float]:
    """Return the parts of a return value: numbers, bools and numpy's scalars, alone or by name.

    Raises:
        ValueError: for a value that is not a finite number, and for a part's name that MLflow would not accept.
    """
    parts = value if isinstance(value, dict) else {WHOLE_REWARD: value}
    if not parts:
        raise ValueError("returned an empty dict: a finite number is needed")
    if len(parts) > MAX_PARTS:
        raise ValueError(f"returned {len(parts)} parts: {MAX_PARTS} at most")
    for part in parts:
        if not isinstance(part, str) or not PART_NAME.fullmatch(part):
            raise ValueError(
                f"returned a part named {_shown(part)}: letters without accents, digits, '_', '-', '.', ':' and blanks are allowed, "
                "64 at most, the first a letter, a digit or '_'"
            )
    return {part: _number(part, found) for part, found in parts.items()}


def _number(part: str, found: object) -> float:
    is_numpy = type(found).__module__ == "numpy" and getattr(found, "shape", None) == ()
    plain: Any = found.item() if is_numpy and hasattr(found, "item") else found
    try:
        number = float(plain) if isinstance(plain, int | float) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"returned {_shown(found)} for {part!r}: a finite number is needed")
    return number


def _shown(value: object) -> str:
    try:
        return repr(value)[:SHOWN_CHARACTERS]
    except Exception:  # noqa: BLE001  # a user's object may raise anything
        return f"a {type(value).__name__}"


def said(error: BaseException) -> str:
    """Return an error's class and text in one line, cut to MAX_ERROR_CHARACTERS."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # as above
        text = "(an error whose text cannot be read)"
    return " ".join(f"{type(error).__name__}: {text[: 4 * MAX_ERROR_CHARACTERS]}".split())[:MAX_ERROR_CHARACTERS]


def place(error: BaseException) -> str:
    """Return the innermost line of a user's that raised the error, or that called the code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def is_users(filename: str) -> bool:
    """Whether a file of a traceback is a user's: neither of ours nor of an installed package."""
    return filename.startswith(EXAMPLES) or not (filename.startswith(OURS) or is_installed(Path(filename)))


def place_of_function(function: object) -> str:
    """Return `, function at FILE:LINE` of a user's function, or of an object's `__call__`; empty for others, and where there is no source."""
    made = function if inspect.isroutine(function) else getattr(type(function), "__call__", function)  # noqa: B004  # its code
    code = getattr(inspect.unwrap(made), "__code__", None) if callable(made) else None
    return f", function at {code.co_filename}:{code.co_firstlineno}" if code and is_users(code.co_filename) else ""
