"""Variants of a run: the grid of some fields' values, each a run of its own with a name that says its values."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infra.config import RunConfig
from infra.config.tools.base import json_or_text
from infra.config.tools.overrides import flattened, with_overrides
from infra.config.tools.reward_file import RewardFile
from infra.config.tools.schema import shown

MAX_VARIANTS = 200
"""More is taken for a slip of the pen."""
NOT_SWEPT = ("name", "tracking")
"""Of a sweep they are given once."""


class Axis(NamedTuple):
    field: str
    values: tuple[Any, ...]
    """As JSON gives them, or as bare text."""


def axis_of(text: str) -> Axis:
    """`trainer.learning_rate=1e-4,3e-4`, or a JSON list of values where a value holds commas itself, such as `evaluation.pass_at_k=[[1], [1, 4]]`.

    Raises:
        ValueError: for anything else; says what would be right.
    """
    field, equals, listed = text.partition("=")
    if not equals or not field or not listed.strip():
        raise ValueError(f"{text!r} is no FIELD=VALUE,VALUE,..., such as trainer.learning_rate=1e-4,3e-4")
    if field.split(".")[0] in NOT_SWEPT:
        raise ValueError(
            f"{field} cannot be swept: the names of the variants are made from the sweep's, and they share its experiment"
        )
    if listed.lstrip().startswith("["):
        try:
            values = json.loads(listed)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} begins like a JSON list of values and is none: {error}") from error
    else:
        values = [json_or_text(part.strip()) for part in listed.split(",")]
    twice = [value for value, count in Counter(map(json.dumps, values)).items() if count > 1]
    if twice or not values:
        raise ValueError(f"{text!r} names {f'the value {twice[0]} twice' if twice else 'no value'}: name each once")
    return Axis(field, tuple(values))


def variants(base: RunConfig, over: Sequence[str]) -> list[RunConfig]:
    """The grid in the order in which it is written, the last field changing fastest.

    base: what they share; its name is the sweep's, and begins theirs.
    over: for each swept field its values; see `axis_of`.

    Raises:
        ValueError: for a field or a value that cannot be, or two variants that would be the same; names it.
    """
    axes = [axis_of(text) for text in over]
    if not axes:
        raise ValueError("a sweep needs a field with values, such as trainer.learning_rate=1e-4,3e-4")
    twice = [field for field, count in Counter(axis.field for axis in axes).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is swept twice: name all of its values at once")
    points = list(itertools.product(*(axis.values for axis in axes)))
    if len(points) > MAX_VARIANTS:
        raise ValueError(
            f"{' x '.join(str(len(axis.values)) for axis in axes)} values are {len(points)} variants: {MAX_VARIANTS} or fewer"
        )
    made = [_variant(base, axes, point) for point in points]
    _check_distinct(made, lambda variant: variant.name.lower())
    _check_distinct(made, lambda variant: variant.model_dump_json(exclude={"name"}))
    return made


def _check_distinct(made: Sequence[RunConfig], identity: Callable[[RunConfig], str]) -> None:
    seen: dict[str, str] = {}
    for variant in made:
        earlier = seen.setdefault(identity(variant), variant.name)
        if earlier is not variant.name:
            raise ValueError(f"variants {earlier!r} and {variant.name!r} of the sweep cannot be told apart: leave one out")


def _variant(base: RunConfig, axes: Sequence[Axis], point: Sequence[Any]) -> RunConfig:
    labels = _labels([axis.field for axis in axes])
    name = "-".join([base.name, *(f"{label}-{_in_name(value)}" for label, value in zip(labels, point, strict=True))])
    changes = [f"{axis.field}={json.dumps(value)}" for axis, value in zip(axes, point, strict=True)]
    changes.append(f"tracking.sweep={json.dumps(base.name)}")
    return with_overrides(base, changes, name=name)


def _labels(fields: Sequence[str]) -> list[str]:
    """The last word of each field, or all of it where two end alike."""
    last = [field.rpartition(".")[2] for field in fields]
    return [word if last.count(word) == 1 else field for word, field in zip(last, fields, strict=True)]


def _in_name(value: Any) -> str:
    """Characters that no name may have become `_`. Of a reward's file only the name counts."""
    if isinstance(value, str) and (file := RewardFile.parse(value)):
        value = f"{file.path.stem}.{file.function}"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", shown(value)).strip("_") or "none"


def overrides_between(before: RunConfig, config: RunConfig) -> list[str]:
    """The changes, names left out, that make one configuration the other; as `with_overrides` takes them."""
    was, now = flattened(before.model_dump(mode="json")), flattened(config.model_dump(mode="json"))
    return [f"{field}={json.dumps(now[field])}" for field in now if field != "name" and was.get(field) != now[field]]
