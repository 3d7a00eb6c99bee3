"""Who plays an episode, and which fields of the section `environment` have an effect with whom. Three rules of infra.config.rules.

A field away from its default that has none is refused: by a rule where the configuration says who plays, else when a worker has imported the
environment (infra.environments.episodes.check). docs/how-to/multi-turn.md has this as a table.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from infra.config.sections.data import DataConfig
from infra.config.sections.environments.taskset import SOURCE
from infra.config.sections.evaluation import place_of
from infra.config.sections.rewards.reward import RewardConfig
from infra.config.sections.sampling import HOW_EPISODES_RUN, EnvironmentConfig

if TYPE_CHECKING:  # RunConfig's own module imports the rules
    from infra.config.sections.run import RunConfig

Player = Literal["class", "agent", "program", "taskset", "harness"]
"""A class with reset and step; an agent in Python; environment.command; a taskset that is played by our chat loop, or by a harness of its own."""
NAMES: tuple[str, ...] = ("kind", "name", "command", "id", "mcp")
"""Fields that say who plays, or are refused elsewhere."""
OWN_TIME = "an agent has no calls of reset and step, and what it does between two turns is its own; environment.episode_timeout_s ends it"
OWN_MESSAGES = "an agent writes its own messages, and the gateway leaves nothing out of them"
OWN_CALLS = "it limits tools in Python and of environment.mcp, and a program calls its tools by itself"
OWN_HARNESS = "the taskset has a harness of its own, whose calls of tools are its own"
IDEMPOTENT = "it is for tasksets; a tool in Python says by @tool(idempotent=True) that a call may be repeated"
WITHOUT_EFFECT: dict[str, dict[Player, str]] = {
    "turn_timeout_s": {"agent": OWN_TIME, "program": OWN_TIME, "harness": OWN_HARNESS},
    "max_observation_tokens": {"agent": OWN_MESSAGES, "program": OWN_MESSAGES, "harness": OWN_HARNESS},
    "tool_timeout_s": {
        "program": OWN_CALLS,
        "taskset": "a call of a taskset's tool has environment.turn_timeout_s",
        "harness": OWN_HARNESS,
    },
    "max_result_characters": {
        "program": OWN_CALLS,
        "taskset": "the result of a taskset's tool has environment.max_observation_tokens",
        "harness": OWN_HARNESS,
    },
    "repeats_tools": {"class": IDEMPOTENT, "agent": IDEMPOTENT, "program": IDEMPOTENT, "harness": OWN_HARNESS},
}
"""Field -> who plays without it, and why."""
OF_PROMPTS = ("instruction", "template", "chat_template_kwargs")
"""Fields of the section `data` that make prompts of rows, which no episode has: its environment writes messages, and the gateway renders them."""


def environment_fields_have_an_effect(config: "RunConfig") -> None:
    sets = [(place_of(name), each.environment) for name, each in config.eval_configs.items() if each.environment is not None]
    if not config.environment.label and not sets:
        decide = [each for each in _changed(config.environment) if each[0] not in HOW_EPISODES_RUN]
        for field, value in decide:
            raise ValueError(
                f"environment.{field} {value} without an environment: name one by environment.name, command or id, or leave this at "
                f"{_default(field)}"
            )
    for place, environment in [("", config.environment), *sets]:
        check_fields(environment, _players(environment), place)
    if config.environment.label:
        _check_reward(config)
        _check_prompts(config.environment.label, {name: getattr(config.data, name) for name in OF_PROMPTS}, "")
    played = {name: each.environment for name, each in config.eval_configs.items()}
    for asked in config.evaluation.asked:
        if (player := played.get(asked.name)) is not None:
            _check_prompts(player.label, asked.data, place_of(asked.name))


def _check_reward(config: "RunConfig") -> None:
    """Raises ValueError for a reward that scores nothing: an environment gives the rewards, and evaluations have it, or rewards of their own."""
    sets = [each for each in config.eval_configs.values() if each.environment is None and not each.inspect]
    if any(each.reward.called == config.reward.called for each in sets):
        return
    for field in ("name", "functions"):
        default = RewardConfig.model_fields[field].default
        if (value := getattr(config.reward, field)) != default:
            shown = value if isinstance(value, str) else [function.name for function in value]
            raise ValueError(
                f"reward.{field} {_written(shown)} has no effect with {config.environment.label!r}: an environment gives the rewards; leave it at "
                f"its default, {_written(default)}"
            )


def _check_prompts(label: str, data: Mapping[str, Any], place: str) -> None:
    """Raises ValueError for a field away from its default that would make other prompts, of which an episode has none."""
    for name in OF_PROMPTS:
        default = DataConfig.model_fields[name].default
        if (value := data.get(name, default)) != default:
            raise ValueError(
                f"{place}data.{name} {_written(value)} has no effect with {label!r}: an environment writes its own messages, in the model's own chat "
                f"template; put it into them, and leave this at its default, {_written(default)}"
            )


def check_fields(config: EnvironmentConfig, players: Sequence[Player], place: str = "") -> None:
    """Raises ValueError for a field away from its default that has no effect with any of these players.

    place: Beginning of the error, of an evaluation's set.
    """
    for field, value in _changed(config):
        why = WITHOUT_EFFECT.get(field, {})
        if players and all(player in why for player in players):
            raise ValueError(
                f"{place}environment.{field} {value} has no effect with {config.label!r}: {why[players[0]]}; leave it at {_default(field)}"
            )


def tasksets_play_their_own_tasks(config: "RunConfig") -> None:
    wanted = f"{SOURCE}{config.environment.id}"
    if config.environment.id and config.data.source != wanted:
        raise ValueError(
            f"data.source {config.data.source!r} with environment.id {config.environment.id!r}: a taskset plays its own tasks, set data.source to "
            f"{wanted!r}"
        )


def episodes_fit_a_microbatch(config: "RunConfig") -> None:
    longest, most = config.engine.max_context_tokens, config.trainer.max_tokens_per_microbatch
    if config.environment.label and most is not None and longest > most:
        raise ValueError(
            f"engine.max_context_tokens {longest} is the longest episode of environment {config.environment.label!r}, more than "
            f"trainer.max_tokens_per_microbatch {most}"
        )


def _players(config: EnvironmentConfig) -> tuple[Player, ...]:
    """Who may play, as far as the configuration says it."""
    if config.command:
        return ("program",)
    return ("class", "agent") if config.name else ("taskset", "harness") if config.id else ()


def _changed(config: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """Yield fields away from their defaults, with their values."""
    for field, about in EnvironmentConfig.model_fields.items():
        if field not in NAMES and (value := getattr(config, field)) != about.default:
            yield field, _written(value)


def _default(field: str) -> str:
    return f"its default, {_written(EnvironmentConfig.model_fields[field].default)}"


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
