"""Rewards: built-in ones by name, of which the quick ones run in this process, and a user's own by file and function or by dotted path.
What does not run in this process is called by a worker.

A reward takes what it names; infra/rewards/signatures.py has the other forms in which it may be written.

    def my_reward(*, completion: str, answer: str) -> float | dict[str, float] | None: ...
"""

import logging
from collections.abc import Callable

from infra.config import JUDGED_BY_MODEL, REWARD_MODEL, RewardConfig, RewardFunction
from infra.config.tools.overrides import nearest
from infra.config.tools.reward_file import RewardFile
from infra.models import base_model
from infra.processes import child_environment
from infra.rewards import built_in, client
from infra.rewards.built_in import gsm8k
from infra.store import code_digest
from tasks.rewards import by_model, by_reward_model, user_files

log = logging.getLogger(__name__)

Reward = Callable[..., float | dict[str, float]]

BUILT_IN: dict[str, Reward] = {
    "gsm8k_verl_strict": gsm8k.verl_strict,
    "gsm8k_verl_flexible": gsm8k.verl_flexible,
    "gsm8k_numeric": gsm8k.numeric,
}
"""Those that are called in this process."""
NAMES = (*BUILT_IN, *built_in.PLACES, *JUDGED_BY_MODEL, REWARD_MODEL)


def check(config: RewardConfig) -> None:
    """Check that a reward can be called: a worker imports it. Warns of fields that are without effect. Raises ValueError, in one line, if it
    cannot be called."""
    _warn_of_unused(config)
    for function in config.called:
        if function.name in JUDGED_BY_MODEL:
            by_model.check(config)
        elif function.name == REWARD_MODEL:
            by_reward_model.check(config)
        elif function.name not in BUILT_IN:
            _check_outside(config, function)


def _warn_of_unused(config: RewardConfig) -> None:
    """A warning only: a run that is replayed with another reward keeps its sections."""
    if config.functions and config.name != RewardConfig().name:
        log.warning("reward.name %r is without effect: reward.functions takes its place", config.name)
    for section, is_used, users in (
        ("judge", config.is_judged_by_model, " or ".join(JUDGED_BY_MODEL)),
        ("model", config.uses_reward_model, REWARD_MODEL),
    ):
        given, default = getattr(config, section), getattr(RewardConfig(), section)
        if not is_used and given != default:
            field = next(name for name, value in given if value != getattr(default, name))
            log.warning(
                "reward.%s.%s is without effect: it belongs to the reward %s, this one is %s", section, field, users, config.title
            )


def _check_outside(config: RewardConfig, function: RewardFunction) -> None:
    check_name(function.name)
    child_environment.of_rewards(config.environment)
    try:
        client.opened(config, function, source_digest(function.name)).form()
    except client.PoolLost as error:
        raise ValueError(f"reward {function.name!r} cannot be imported: {error}") from error


def check_name(name: str) -> None:
    """Check a reward's name, and its file without importing it. Raises ValueError for one that is unknown or not there."""
    if name not in NAMES:
        known = f"known are {', '.join(NAMES)}, or give a file and its function such as mine.py:score"
        check_place(name, "reward", f"is unknown{nearest(name, NAMES)}; {known}, or a dotted path such as my_module.my_reward")


def check_place(name: str, what: str, problem: str) -> None:
    """Check the name of a user's function or class, and its file without importing it.

    what: What it is, as an error says it.
    problem: What an error says of a text that is neither `FILE.py:NAME` nor a dotted path.

    Raises:
        ValueError: for such a text, and for a file that is not there or is not valid Python.
    """
    file = RewardFile.parse(name)
    if not (file.function.isidentifier() if file else "." in name and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"{what} {name!r} {problem}")
    if file:
        user_files.check(file, what)


def source_digests(config: RewardConfig) -> str:
    """Digest all functions of a reward as `source_digest` does, the rubric of a judge, and the files of a reward model."""
    of_models = [by_model.source_digest(config.judge)] if config.is_judged_by_model else []
    of_models += [base_model.reference(config.judge.model).sha256] if config.has_judge_server else []
    of_models += [by_reward_model.source_digest(config)] if config.uses_reward_model else []
    return " ".join(filter(None, [*(source_digest(function.name) for function in config.called), *of_models]))


def source_digest(name: str) -> str:
    """Digest a user's reward with all modules that it loads from outside the installed packages, and the packages' versions, without importing
    them; so a built-in one that a worker calls. The others are covered by the sources of the task that calls them."""
    if name in BUILT_IN or name in JUDGED_BY_MODEL or name == REWARD_MODEL:
        return ""
    name = built_in.PLACES.get(name, name)
    file = RewardFile.parse(name)
    return user_files.source_digest(file) if file else code_digest.digest_of_foreign(name.rpartition(".")[0])
