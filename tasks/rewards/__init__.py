"""Reward functions: built-in ones by name, a user's own by file and function or by dotted path.

A reward is called with keywords. It returns the reward, or its named parts, whose sum is the reward:

    def my_reward(*, question: str, completion: str, answer: str) -> float | dict[str, float]: ...
"""

import contextlib
import importlib
import inspect
import math
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from infra.config.tools.overrides import nearest
from infra.config.tools.reward_file import RewardFile
from infra.failures import RewardFailed
from infra.store import code_digest
from infra.store.samples import WHOLE_REWARD
from tasks.rewards import gsm8k, user_files

SHOWN_CHARACTERS = 200
"""Characters of a question and of a completion that are shown in an error."""
MAX_ERROR_CHARACTERS = 500
Reward = Callable[..., float | dict[str, float]]

BUILT_IN: dict[str, Reward] = {
    "gsm8k_verl_strict": gsm8k.verl_strict,
    "gsm8k_verl_flexible": gsm8k.verl_flexible,
    "gsm8k_numeric": gsm8k.numeric,
}

PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .:-]{0,63}")
"""Valid name of a part of a reward. It becomes part of a metric's name."""


def find(name: str) -> Reward:
    """Find a reward. Raises ValueError for a name that is neither built in nor that of a function with the right arguments."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    file = RewardFile.parse(name)
    function = file.function if file else name.rpartition(".")[2]
    if not (function.isidentifier() if file else "." in name and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(
            f"reward {name!r} is unknown{nearest(name, BUILT_IN)}; known are {', '.join(BUILT_IN)}, or give a file and its function such as "
            "mine.py:score, or a dotted path such as my_module.my_reward"
        )
    if file:
        user_files.check(file)
    with user_files.importing_from(file):
        return _checked(name, _member(_imported(name, file), function, name))


def _imported(name: str, file: RewardFile | None) -> ModuleType:
    try:
        return user_files.load(file) if file else importlib.import_module(name.rpartition(".")[0])
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and may call sys.exit
        said = str(error) if isinstance(error, ImportError) else _said(error)
        raise ValueError(f"reward {name!r} cannot be imported: {said}{_place(error)}") from error


def _member(module: ModuleType, function: str, name: str) -> object:
    found = getattr(module, function, None)
    if found is None:
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        has = f"functions there: {', '.join(own)}" if own else "there is no function in it"
        raise ValueError(f"reward {name!r} does not exist{nearest(function, own)}; {has}")
    return found


def _checked(name: str, found: object) -> Reward:
    if not callable(found):
        raise ValueError(f"reward {name!r} is no function but a {type(found).__name__}")
    try:
        inspect.signature(found).bind(question="", completion="", answer="")
    except TypeError as error:
        raise ValueError(f"reward {name!r} must take the keywords question, completion and answer: {error}") from error
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004  # its kind
        raise ValueError(f"reward {name!r} is an async function: give a plain one")
    try:
        inspect.getsourcefile(found)
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} is an object of {type(found).__name__}, whose source cannot be found, and a step's cache key needs it: "
            "wrap it in a function"
        ) from error
    return found


def source_digest(name: str) -> str:
    """Digest a user's reward with all modules that it loads from outside the installed packages, and the packages' versions. Built-in rewards
    are covered by the sources of the task that calls them."""
    if name in BUILT_IN:
        return ""
    if file := RewardFile.parse(name):
        return user_files.source_digest(file, find(name))
    modules = dict.fromkeys((name.rpartition(".")[0], str(find(name).__module__)))
    return " ".join(code_digest.digest_of_foreign(module) for module in modules)


def called(name: str, reward: Reward, *, question: str, completion: str, answer: str) -> dict[str, float]:
    """Return the parts of a sample's reward.

    Raises:
        RewardFailed: if the function raises or returns no finite number; one line with the sample and the line in the user's file.
    """
    about = f"for question {_shown(question)}, completion {_shown(completion)}"
    try:
        with user_files.importing_from(RewardFile.parse(name)):
            value = reward(question=question, completion=completion, answer=answer)
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything
        raise RewardFailed(f"reward {name!r} raised {_said(error)}{_place(error)}, {about}") from None
    try:
        return parts_of(name, value)
    except ValueError as error:
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that it was never awaited
        said = " ".join(str(error).split())
        raise RewardFailed(f"{said}, {about}, function at {_place_of_function(reward)}") from None


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARACTERS]


def _place(error: BaseException) -> str:
    """Return the innermost line of a user's that raised the error, or that called the code that raised it."""
    ours = (__file__, user_files.__file__, contextlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    own = [frame for frame in frames if not code_digest.is_installed(Path(frame.filename))]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _place_of_function(reward: Reward) -> str:
    code = getattr(inspect.unwrap(reward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(reward)


def parts_of(name: str, value: object) -> dict[str, float]:
    """Return the parts of a reward's return value: numbers, bools and numpy's scalars, alone or by name.

    Raises:
        ValueError: for a value or a sum of parts that is not a finite number, and for a part's name that MLflow would not accept.
    """
    parts = value if isinstance(value, dict) else {WHOLE_REWARD: value}
    if not parts:
        raise ValueError(f"reward {name!r} returned an empty dict: a finite number is needed")
    for part in parts:
        if not isinstance(part, str) or not PART_NAME.fullmatch(part):
            raise ValueError(
                f"reward {name!r} returned a part named {part!r}: letters without accents, digits, '_', '-', '.', ':' and blanks are allowed, "
                "64 at most, the first a letter, a digit or '_'"
            )
    made = {part: _number(name, part, found) for part, found in parts.items()}
    if not math.isfinite(sum(made.values())):
        raise ValueError(f"reward {name!r} returned parts whose sum is {sum(made.values())}: a finite number is needed")
    return made


def _number(name: str, part: object, found: object) -> float:
    plain = found.item() if isinstance(found, np.generic) else found
    try:
        number = float(plain) if isinstance(plain, int | float) else math.nan
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        shown = repr(found)[:SHOWN_CHARACTERS]
        raise ValueError(f"reward {name!r} returned {shown} for {part!r}: a finite number is needed")
    return number
