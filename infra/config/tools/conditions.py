"""Conditions on columns: `level >= 3`, `lang == en`, `extra_info.split in train,dev`. A row is kept that meets all of them."""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

FORM = re.compile(r"\s*([\w.-]+)\s*(==|!=|<=|>=|<|>|\bin\b)\s*([^\s=].*?)\s*")
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, choices: value in choices,
}


class Condition(NamedTuple):
    text: str
    path: tuple[str, ...]
    """Column, and the place in its values."""
    sign: str
    value: Any  # JSON
    written: tuple[str, ...] = ()
    """The value, or each of several, as it is written: a text is also equal to this, such as "2024" to 2024."""

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets it. A row without the value meets only !=.

        Raises:
            ValueError: for a value that cannot be compared with the condition's.
        """
        found: Any = row
        for name in self.path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            return self.sign == "!=" and self.value is not None
        if found in self.written:
            return self.sign in ("==", "in")
        try:
            return bool(COMPARISONS[self.sign](found, self.value))
        except TypeError as error:
            raise ValueError(
                f"data.filter {self.text!r} cannot compare {json.dumps(found)[:40]} with {json.dumps(self.value)}"
            ) from error


def condition_of(text: str) -> Condition:
    """Raises ValueError for text that is no condition."""
    match = FORM.fullmatch(text)
    if not match:
        raise ValueError(
            f"data.filter {text!r} is no condition: write COLUMN, one of {' '.join(COMPARISONS)}, and a value, as in level >= 3"
        )
    column, sign, value = match.groups()
    parts = value.split(",") if sign == "in" else [value]
    written = tuple(part.strip() for part in parts) if sign in ("==", "!=", "in") else ()
    return Condition(text, tuple(column.split(".")), sign, [*map(_value, parts)] if sign == "in" else _value(value), written)


def _value(text: str) -> Any:  # JSON
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()


def check_columns(conditions: Sequence[Condition], names: Sequence[str]) -> None:
    """Raises ValueError for a column that the data set lacks."""
    for condition in conditions:
        if condition.path[0] not in names:
            raise ValueError(
                f"data.filter {condition.text!r}: there is no column {condition.path[0]!r}; there are {', '.join(names)}"
            )
