"""Parameters that flows share: a preset, a name, a number of steps and the fields that differ; what the form of a deployment shows of them,
and the configuration that they come to."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, SkipValidation, WithJsonSchema

from flows import presets
from infra.comparison.config import ComparisonConfig
from infra.config import RunConfig
from infra.config.tools.base import ConfigBase
from infra.config.tools.form import changes_in, schema_of
from infra.config.tools.names import NAME_PATTERN
from infra.config.tools.overrides import changed_by, flattened
from infra.runs.run_state import config_of, known_runs

C = TypeVar("C", bound=ConfigBase)

AUTO = "auto"
NAMED_APART = ("name", "num_steps")
"""Fields with parameters of their own."""
PRESET: Any = Field(default=AUTO, json_schema_extra={"enum": [AUTO, *presets.PRESETS], "position": -3})
NAME: Any = Field(default="", json_schema_extra={"pattern": rf"^$(?!\n)|{NAME_PATTERN}", "position": -2})
NUM_STEPS: Any = Field(default=0, json_schema_extra={"minimum": 0, "position": -1})
CHANGES: Any = Field(default=None, json_schema_extra={"position": 99})
"""Defaults with places in the form; a flow's other parameters have their place in the signature, 0 and above."""
RunChanges = Annotated[
    RunConfig | dict[str, Any] | None, SkipValidation, WithJsonSchema(schema_of(RunConfig, leaves_out=NAMED_APART))
]
"""A whole configuration, or fields that differ; `resolved` checks them, in one line."""
ComparisonChanges = Annotated[
    ComparisonConfig | dict[str, Any] | None, SkipValidation, WithJsonSchema(schema_of(ComparisonConfig, leaves_out=NAMED_APART))
]


def resolved(
    config: RunChanges, preset: str = AUTO, name: str = "", num_steps: int = 0, *, otherwise: str = "arithmetic"
) -> RunConfig:
    """Return the configuration that a flow's parameters come to.

    config: A whole configuration, which is taken as it is, or fields over the preset.
    preset: Named configuration to start from. auto: that of the run `name`, if there is one, else the preset `otherwise`.
    name, num_steps: Fields of their own, where they are not empty or 0.

    Raises:
        ValueError: for a preset or field that does not exist, or a value that does not fit; one line that names it.
    """
    if isinstance(config, RunConfig):
        base = config
    elif preset == AUTO and name and name in known_runs():
        base = config_of(name)
    else:
        base = presets.preset(otherwise if preset == AUTO else preset)
    return with_changes(base, config, name, num_steps)


def resolved_comparison(config: ComparisonChanges, name: str = "", num_steps: int = 0) -> ComparisonConfig:
    """Return the comparison that a flow's parameters come to. Raises as `resolved` does."""
    base = config if isinstance(config, ComparisonConfig) else ComparisonConfig()
    return with_changes(base, config, name, num_steps)


def with_changes(base: C, config: object, name: str = "", num_steps: int = 0) -> C:
    """Return a configuration with the fields that the parameters change."""
    changes = fields_in(type(base), config) | ({"name": name} if name else {}) | ({"num_steps": num_steps} if num_steps else {})
    return changed_by(base, changes) if changes else base


def fields_in(model: type[ConfigBase], config: object) -> dict[str, Any]:
    """Return the fields that a parameter `config` changes."""
    if config is None or isinstance(config, model):
        return {}
    if not isinstance(config, Mapping):
        raise ValueError(
            f'config {config!r} is no set of fields: give names with values, such as {{"trainer": {{"learning_rate": 1e-4}}}}'
        )
    return changes_in(model, config)


def as_overrides(config: RunChanges) -> list[str]:
    """Return changes of a configuration as FIELD=VALUE; a name is left out."""
    flat = flattened(fields_in(RunConfig, config))
    return [f"{field}={json.dumps(value)}" for field, value in flat.items() if field != "name"]
