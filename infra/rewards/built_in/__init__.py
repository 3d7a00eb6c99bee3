"""Built-in rewards that a worker calls, by name. Their parameters are columns of the row, or its answer."""

import importlib

from infra.rewards.built_in.base import BuiltIn

PLACES = {
    name: f"{__name__}.{place}"
    for name, place in {
        "exact_match": "matching.ExactMatch",
        "regex_match": "matching.RegexMatch",
        "json_schema": "json_schema.JsonSchema",
    }.items()
}
"""Module and class of each. A module is imported where its reward is used."""


def made(name: str) -> BuiltIn:
    """Return the reward of a name of PLACES."""
    module, _, member = PLACES[name].rpartition(".")
    found = getattr(importlib.import_module(module), member)()
    assert isinstance(found, BuiltIn)
    return found
