"""A reward for completions that are JSON of a given schema."""

import json
from functools import lru_cache
from typing import Any, NoReturn

import jsonschema
import referencing

from infra.rewards.built_in.base import BuiltIn, parameter, shown
from infra.rewards.signatures import Fields

NUM_KEPT = 256
"""Schemas that stay ready: the samples of a group have the same one."""


class JsonSchema(BuiltIn):
    """1 if the whole completion is JSON and valid by the schema of the row's column `schema`, else by that in the answer.

    A schema is an object, or JSON text. Its dialect is that of `$schema`, by default 2020-12. The keyword `format` says nothing, as the
    standard has it. Nothing is loaded: references must point into the schema.
    """

    def __call__(self, *, completion: str, answer: str, row: Fields) -> float:
        validator = _validator_of(answer, row)
        try:
            value = json.loads(completion, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        return float(validator.is_valid(value))

    def check_row(self, answer: str, row: Fields) -> None:
        _validator_of(answer, row)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _validator_of(answer: str, row: Fields) -> Any:  # Any: jsonschema has no types
    schema, place = parameter(row, "schema", answer)
    try:
        return _validator(schema if isinstance(schema, str) else json.dumps(schema))
    except (ValueError, RecursionError, jsonschema.SchemaError) as error:
        said = error.message if isinstance(error, jsonschema.SchemaError) else error
        raise ValueError(f"the row's {place} {shown(schema)} is no JSON schema: {said}: correct it") from None


@lru_cache(NUM_KEPT)
def _validator(text: str) -> Any:  # Any: as above
    """Raises ValueError or SchemaError for a text that is no schema."""
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object or a boolean")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=referencing.Registry())
