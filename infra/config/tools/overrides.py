"""Changes of a configuration given as text: `trainer.lora.rank=4`."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from infra.config import RunConfig
from infra.config.tools.base import ConfigBase, json_or_text

S = TypeVar("S", bound=ConfigBase)
PLAIN = {"missing": "is missing", "extra_forbidden": "does not exist"}
"""Type of a finding of pydantic -> what is said of its field."""


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
        _set(content, field, json_or_text(text))
    try:
        return type(config).model_validate(content)
    except ValidationError as error:
        raise ValueError(one_line(error)) from error


def changed_by(config: S, content: dict[str, Any]) -> S:
    """A validated copy with the fields of a file; a section that the file leaves out, or part of one, stays as it is.

    Raises:
        ValueError: as `changed` does.
    """
    flat = flattened({name.replace("-", "_"): value for name, value in content.items()})
    return changed(config, [f"{field}={json.dumps(value, default=str)}" for field, value in flat.items()])


def read_config_file(path: Path) -> dict[str, Any]:
    """Read fields from a JSON, YAML or TOML file.

    Raises:
        ValueError: for a file that cannot be read, or holds no fields; one line that names it.
    """
    try:
        content = _parsed(path)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"--config {path} holds no fields: give names with values, such as num_steps: 20")
    return content


def _parsed(path: Path) -> Any:  # Any: what the file holds
    try:
        text = path.read_text(encoding="utf-8-sig")
        match path.suffix:
            case ".json":
                return json.loads(text, object_pairs_hook=_once)
            case ".toml":
                return tomllib.loads(text)
            case ".yaml" | ".yml":
                return _yaml(text)
    except ValueError as error:
        raise ValueError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    raise ValueError(f"--config {path} has an unknown ending: give a .json, .yaml or .toml file")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:  # Any: as above
    """Raises ValueError for a name that is there twice, of which a parser would take the last without a word."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} is given twice: give it once")
    return dict(pairs)


def _yaml(text: str) -> Any:  # Any: as above
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is not typed
        def compose_mapping_node(self, anchor: dict[Any, yaml.Node] | None) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            _once([(str(name.value), value) for name, value in node.value if isinstance(name, yaml.ScalarNode)])
            return node

    try:
        return Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer": {"lora": {"rank": 8}}} -> {"trainer.lora.rank": 8}.

    Raises:
        ValueError: for a field that is there in both ways.
    """
    flat: list[tuple[str, Any]] = []
    for name, value in config.items():
        flat += flattened(value, f"{prefix}{name}.").items() if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return _once(flat)


def one_line(error: ValidationError) -> str:
    """All findings of a validation, each with its place and value."""
    found = []
    for finding in error.errors():
        place, message, value = ".".join(map(str, finding["loc"])), finding["msg"].removeprefix("Value error, "), finding["input"]
        if finding["type"] in PLAIN:
            found.append(f"{place} {PLAIN[finding['type']]}")
        elif finding["type"] in ("tuple_type", "list_type", "dict_type") and str(value).startswith(("[", "{")):
            found.append(f"{place} = {value!r}: this is no valid JSON")
        elif finding["type"] == "value_error" and isinstance(value, dict):
            found.append(message)  # of a section's rule, which names its fields and values
        else:
            found.append(_said(place, value, message))
    return "; ".join(found)


def _said(place: str, value: object, message: str) -> str:
    """Name the place of a wrong value, and the value unless the message does."""
    if not place:
        return message
    is_named = isinstance(value, str) and repr(value) in message
    return f"{place}: {message}" if is_named else f"{place} = {value!r}: {message}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that name the known one which is most like a name; empty where none is like it. What is in the same section comes first."""
    names = list(known)
    section, dot, rest = name.partition(".")
    inside = [each.removeprefix(section + dot) for each in names if dot and each.startswith(section + dot)]
    near = _closest(rest, inside)
    found = section + dot + near if near else _closest(name, names)
    return f"; the nearest is {found}" if found else ""


def _closest(name: str, known: Sequence[str]) -> str:
    """Of those that have its last word, or of which it is the initials, such as lr of learning_rate; else of all that are spelt like it."""
    last = name.lstrip("-").rpartition(".")[2]
    words = {each: each.lstrip("-").split(".") for each in known}
    same = [each for each in known if last in words[each]]
    same = same or [each for each in known if len(last) > 1 and last == "".join(part[:1] for part in words[each][-1].split("_"))]
    found = difflib.get_close_matches(name, same or known, n=1, cutoff=0 if same else 0.6)
    return found[0] if found else ""


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
