"""Changes of a configuration as a form: every section closed and every field empty until it is to differ.

Prefect draws its form from a JSON schema. It shows alternatives (anyOf) as buttons, null as a closed section, and a field without a
default as an empty one. What it says of a wrong value under anyOf names no field; `then` holds the same fields once more, without
alternatives, to check values by.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.config.tools.schema import Field, field_of, meaning_of, section_model

Schema = dict[str, Any]  # Any: JSON
UNCHANGED: Schema = {"type": "null", "title": "unchanged"}
AS_JSON: Schema = {"title": "JSON"}
"""Without a type: an editor for a whole configuration."""
ABOUT = ("title", "description", "default")


def schema_of(model: type[BaseModel], leaves_out: Collection[str] = ()) -> Schema:
    """Return the JSON schema of changes of a configuration.

    leaves_out: Fields that the form does not show; they are valid all the same.
    """
    change = shown_section(model, leaves_out)
    return {"anyOf": [UNCHANGED, change, AS_JSON], "if": {}, "then": checked_section(model)}


def changes_in(model: type[BaseModel], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a form changes; it sends null for a field or a section that it leaves as it is."""
    changes: dict[str, Any] = {}
    for name, value in content.items():
        field = model.model_fields.get(name)
        section = section_model(field) if field else None
        if value is None and field and (section or not is_nullable(field)):
            continue
        changes[name] = changes_in(section, value) if section and isinstance(value, Mapping) else value
    return changes


def is_nullable(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def in_order(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield a model's own fields, then its sections, each in the order in which they are declared."""
    yield from sorted(model.model_fields.items(), key=lambda item: section_model(item[1]) is not None)


def shown_section(model: type[BaseModel], leaves_out: Collection[str] = ()) -> Schema:
    values = model.model_json_schema()["properties"]
    properties: Schema = {}
    for name, field in in_order(model):
        if section := section_model(field):
            alternatives = [UNCHANGED, shown_section(section)]
            properties[name] = {"title": name, "description": meaning_of("", section), "anyOf": alternatives}
        elif name not in leaves_out and "const" not in values[name]:
            properties[name] = shown_field(field_of(name, field), values[name])
    return {"type": "object", "title": "change", "properties": properties}


def shown_field(field: Field, value: Schema) -> Schema:
    about = {"title": field.name, "description": help_of(field)}
    match value:
        case {"type": "boolean"}:  # a toggle cannot be empty; with choices it is a list
            return about | {"anyOf": [UNCHANGED, {"type": "boolean", "title": "set", "enum": [True, False]}]}
        case {"anyOf": [part, {"type": "null"}]}:
            return about | {"anyOf": [part | {"title": "value"}, {"type": "null", "title": "none"}]}
    return about | bare(value)


def help_of(field: Field) -> str:
    bounds = ", ".join(filter(None, (field.unit.replace("count", ""), field.range)))
    return f"{field.meaning} [{bounds}]" if bounds else field.meaning


def checked_section(model: type[BaseModel]) -> Schema:
    """Return the schema of a section that may be null; of a field that does not exist it names those that do."""
    values = model.model_json_schema()["properties"]
    properties = {
        name: checked_section(section) if (section := section_model(field)) else checked_field(values[name])
        for name, field in model.model_fields.items()
    }
    return {"type": ["object", "null"], "properties": properties, "propertyNames": {"enum": list(properties)}}


def checked_field(value: Schema) -> Schema:
    part = bare(value.get("anyOf", [value])[0])
    choices = [part["const"]] if "const" in part else part.get("enum")
    valid = {name: limit for name, limit in part.items() if name not in ("const", "enum")}
    return valid | {"type": [part["type"], "null"]} | ({"enum": [*choices, None]} if choices else {})


def bare(value: Schema) -> Schema:
    return {name: limit for name, limit in value.items() if name not in ABOUT}
