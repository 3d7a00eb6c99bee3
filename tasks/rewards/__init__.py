"""Reward functions: by name, or a user's own by dotted path.

A reward is called with keywords and gives the reward, or its named parts, whose sum is the reward:

    def my_reward(*, question: str, completion: str, answer: str) -> float | dict[str, float]: ...
"""

import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path

from infra import sources
from tasks.rewards import gsm8k

Reward = Callable[..., float | dict[str, float]]

BUILT_IN: dict[str, Reward] = {
    "gsm8k_verl_strict": gsm8k.verl_strict,
    "gsm8k_verl_flexible": gsm8k.verl_flexible,
    "gsm8k_numeric": gsm8k.numeric,
}


def find(name: str) -> Reward:
    """Raises ValueError for a name that is neither built in nor the dotted path of a function with the right arguments."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, _, function_name = name.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"reward {name!r} is unknown; known are {', '.join(BUILT_IN)}, or give a dotted path such as my_module.my_reward"
        )
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward {name!r} cannot be imported: {error}") from error
    return _checked(name, found)


def _checked(name: str, found: object) -> Reward:
    if not callable(found):
        raise ValueError(f"reward {name!r} is no function but a {type(found).__name__}")
    try:
        inspect.signature(found).bind(question="", completion="", answer="")
    except TypeError as error:
        raise ValueError(f"reward {name!r} must take the keywords question, completion and answer: {error}") from error
    try:
        inspect.getsourcefile(found)
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} is an object of {type(found).__name__}, whose source nobody can tell, and it is a part of what decides a step: "
            "wrap it in a function"
        ) from error
    return found


def source_digest(name: str) -> str:
    """Of the file that holds a user's reward; built-in ones are covered by the sources of the task that calls them."""
    if name in BUILT_IN:
        return ""
    file = inspect.getsourcefile(find(name))
    return sources.digest_of_file(Path(file)) if file else ""


def parts_of(name: str, value: float | dict[str, float]) -> dict[str, float]:
    """The parts of what a reward returned.

    Raises:
        ValueError: for a value that is no finite number.
    """
    parts = value if isinstance(value, dict) else {"reward": value}
    for part, number in parts.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"reward {name!r} returned {number!r} for {part!r}: a finite number is needed")
    return {part: float(number) for part, number in parts.items()}
