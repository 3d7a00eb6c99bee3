"""Every field of a configuration with type, unit, default and meaning, read off the models: no list kept twice.

Besides, where each value of a resolved configuration comes from.
"""

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.config import RunConfig
from infra.config.tools.overrides import flattened

UNITS = {"_s": "seconds", "_tokens": "tokens", "_steps": "steps", "num_": "count"}
"""By the end or the beginning of a field's name."""
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
Source = Literal["default", "preset", "file", "command line"]


class Field(NamedTuple):
    name: str
    """Dotted, such as trainer.lora.rank."""
    type: str
    unit: str
    """Empty where there is none."""
    range: str
    """Such as >= 1; empty where there is none."""
    default: object
    meaning: str
    """The sentence under the field; empty where its name says all."""

    @property
    def kind(self) -> str:
        """Type, range and unit."""
        bounded = f"{self.type} {self.range}" if self.range else self.type
        return f"{bounded}, {self.unit}" if self.unit else bounded

    @property
    def help(self) -> str:
        return f"{self.meaning} [{self.kind}; default {shown(self.default)}]".lstrip()


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """In the order in which the models declare them."""
    for name, field in model.model_fields.items():
        if section := section_model(field):
            yield from fields_of(section, f"{prefix}{name}.")
        else:
            yield field_of(name, field)._replace(name=prefix + name)


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def field_of(name: str, field: FieldInfo) -> Field:
    meaning = " ".join((field.description or "").split())
    bounds = [
        f"{sign} {getattr(rule, bound)}" for rule in field.metadata for bound, sign in SIGNS.items() if hasattr(rule, bound)
    ]
    default = field.get_default(call_default_factory=True)
    return Field(name, _named(field.annotation), _unit_of(name), " ".join(bounds), default, meaning)


def meaning_of(section: str, model: type[BaseModel] = RunConfig) -> str:
    """The first paragraph of what a section's model says of itself; empty where it says nothing."""
    for name in filter(None, section.split(".")):
        found = section_model(model.model_fields[name])
        assert found is not None
        model = found
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def shown(value: object) -> str:
    """As one would write it on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return "[" + ", ".join(f'"{item}"' if isinstance(item, str) else shown(item) for item in value) + "]"
        case dict():
            return json.dumps({name: each for name, each in value.items() if each is not None}, ensure_ascii=False)
        case "":
            return '""'
    return str(value)


def _named(annotation: Any) -> str:  # Any: an annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return "|".join(_named(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_named(arguments[0])}"
    if origin is Annotated:
        return _named(arguments[0])
    return "null" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))


def _unit_of(name: str) -> str:
    return next((unit for sign, unit in UNITS.items() if name.endswith(sign) or (sign[-1] == "_" and name.startswith(sign))), "")


class FieldSource(NamedTuple):
    field: str
    value: object
    source: Source


def origins(config: RunConfig, preset: RunConfig, named: set[str], file: dict[str, Any] | None = None) -> list[FieldSource]:
    """Each value of a resolved configuration, with where it comes from.

    named: Fields, or sections, that were given on the command line.
    file: Content of a configuration file.
    """
    in_file = flattened(file or {})
    before, resolved = flattened(preset.model_dump(mode="json")), flattened(config.model_dump(mode="json"))
    defaults = flattened(RunConfig().model_dump(mode="json"))

    def source_of(field: str) -> Source:
        if any(field == given or field.startswith(f"{given}.") for given in named):
            return "command line"
        if field in in_file:
            return "file"
        return "preset" if before[field] != defaults[field] else "default"

    return [FieldSource(field, value, source_of(field)) for field, value in resolved.items()]
