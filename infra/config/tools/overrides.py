"""Changes of a configuration given as text: `trainer.lora.rank=4`."""

import difflib
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from infra.config import RunConfig
from infra.config.tools.base import Section

S = TypeVar("S", bound=Section)


def with_overrides(config: RunConfig, changes: list[str], name: str | None = None) -> RunConfig:
    """As changed; name: of the run, where no change gives it another."""
    return changed(config, [*([] if name is None else [f"name={json.dumps(name)}"]), *changes])


def changed(config: S, changes: list[str]) -> S:
    """A validated copy; each change is FIELD=VALUE with the value in JSON or as bare text.

    Raises:
        ValueError: for a field that does not exist, or a value that does not fit; one line that names it.
    """
    content = config.model_dump()
    for change in changes:
        field, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is no FIELD=VALUE")
        _set(content, field, _value(text))
    try:
        return type(config).model_validate(content)
    except ValidationError as error:
        raise ValueError(one_line(error)) from error


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer": {"lora": {"rank": 8}}} -> {"trainer.lora.rank": 8}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def one_line(error: ValidationError) -> str:
    """All findings of a validation, each with its place and value."""
    found = []
    for finding in error.errors():
        place, message = ".".join(map(str, finding["loc"])), finding["msg"].removeprefix("Value error, ")
        found.append(
            f"{place} = {finding['input']!r}: {message}" if place and not isinstance(finding["input"], dict) else message
        )
    return "; ".join(found)


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that name the known one which is most like a name; empty where none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {found[0]}" if found else ""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _set(content: dict[str, Any], field: str, value: Any) -> None:
    *sections, last = field.split(".")
    place: dict[str, Any] = content
    for depth, section in enumerate([*sections, last]):
        if not isinstance(place, dict) or section not in place:
            known = ", ".join(place) if isinstance(place, dict) else "nothing"
            missing = ".".join([*sections, last][: depth + 1])
            near = nearest(field, flattened(content))
            raise ValueError(f"field {missing!r} does not exist{near}; known there: {known}")
        if depth < len(sections):
            place = place[section]
    place[last] = value
