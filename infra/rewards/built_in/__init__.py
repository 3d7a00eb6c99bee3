"""Built-in rewards by name; those that a worker calls take their parameters from the row."""

import importlib

from infra.rewards.built_in.base import BuiltIn

PLACES = {
    name: f"{__name__}.{place}"
    for name, place in {
        "exact_match": "matching.ExactMatch",
        "regex_match": "matching.RegexMatch",
        "json_schema": "json_schema.JsonSchema",
        "math_verl": "math_verl.MathVerl",
        "boxed_integer": "boxed_integer.BoxedInteger",
        "verl": "verl.Verl",
        "math_verify": "math_equal.MathVerify",
        "python_tests": "python_tests.PassesTests",
        "overlong_penalty": "shape.OverlongPenalty",
        "think_format": "shape.ThinkFormat",
    }.items()
}
"""Module and class of each. A module is imported where its reward is used."""


def made(name: str) -> BuiltIn:
    """Return the reward of a name of PLACES."""
    module, _, member = PLACES[name].rpartition(".")
    found = getattr(importlib.import_module(module), member)()
    assert isinstance(found, BuiltIn)
    return found
