"""From a run's configuration to what each of its evaluation sets asks, and to the rows that are therefore not trained on.

READY holds the data and the reward of published sets.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from infra.config.sections.data import DataConfig, DataPart
from infra.config.sections.environments.taskset import SOURCE, taskset_of
from infra.config.sections.evaluation import EvalConfig, EvaluationSet, place_of
from infra.config.sections.rewards.reward import RewardConfig
from infra.config.sections.sampling import PlayedEnvironment

if TYPE_CHECKING:  # RunConfig's own module imports this one
    from infra.config.sections.run import RunConfig


class ReadySet(NamedTuple):
    """What the name of a published set fills in."""

    data: dict[str, Any]
    reward: str


_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
_PLAIN = {"messages_column": None, "template": "chat", "answer_column": "answer"}
_PROBLEM = _PLAIN | {"question_column": "problem", "instruction": _BOXED}
READY = {
    "gsm8k": ReadySet(
        _PLAIN
        | {"source": "openai/gsm8k", "subset": "main", "split": "test", "question_column": "question"}
        | {"instruction": "Give the final number after ####."},
        "gsm8k_numeric",
    ),
    "math-500": ReadySet(_PROBLEM | {"source": "HuggingFaceH4/MATH-500", "split": "test"}, "math_verl"),
    "aime-2024": ReadySet(_PROBLEM | {"source": "HuggingFaceH4/aime_2024", "split": "train"}, "boxed_integer"),
    "aime-2025": ReadySet(_PROBLEM | {"source": "math-ai/aime25", "split": "test"}, "boxed_integer"),
}
"""By the set's name. A set's own fields win: a local file is another data.source."""
HOW_SHOWN = ("instruction", "template", "chat_template_kwargs", "assistant_turn", "tools_column", "max_prompt_tokens", "too_long")
"""Fields of the data that a set of held-out rows may have for itself: they do not change which rows there are."""


def data_given(asked: EvaluationSet) -> dict[str, Any]:
    """The fields of the data that a set has for itself, those of a ready set or of its taskset included."""
    ready = dict(READY[asked.name].data) if asked.name in READY else {}
    if taskset := _played_fields(asked).get("id"):
        ready = {"source": f"{SOURCE}{taskset}"}
    if "source" in asked.data:
        ready.pop("subset", None)  # that of the hub's data set
    return ready | asked.data


def asks_own_rows(config: "RunConfig", asked: EvaluationSet) -> bool:
    """Whether a set asks a part of the rows themselves, which is held out."""
    if asked.inspect:
        return False
    given = data_given(asked)
    source = given.get("source", config.evaluation.source)
    if source is None and not given.get("sources"):
        return config.data.is_single_file or config.data.hold_out or bool(config.data.sources)
    found, trained = (Path(os.path.expanduser(path or "")).resolve() for path in (source, config.data.source))
    return config.data.is_single_file and found == trained


def own_rows(config: "RunConfig") -> list[EvaluationSet]:
    return [asked for asked in config.evaluation.asked if asks_own_rows(config, asked)] if config.evaluation.every else []


def num_held_out(config: "RunConfig") -> int:
    return max((asked.num_prompts or 0 for asked in own_rows(config)), default=0)


def evaluated(config: "RunConfig") -> tuple[DataConfig, ...]:
    """The data sets of evaluations that are not the run's own. Two splits of generated problems have nothing in common."""
    if not config.evaluation.every:
        return ()
    asked = [each for each in config.evaluation.asked if not asks_own_rows(config, each) and not each.inspect]
    found = [DataConfig.model_validate(_fields(config, each)) for each in asked]
    return tuple(dict.fromkeys(data for data in found if not data.source == config.data.source == "arithmetic"))


def _fields(config: "RunConfig", asked: EvaluationSet) -> dict[str, object]:
    """The fields of a set's data. What narrows down the run's own data does not hold for another data set."""
    evaluation, given = config.evaluation, data_given(asked)
    elsewhere: dict[str, object] = {}
    if "source" in given or "sources" in given:
        elsewhere = {"source": "arithmetic", "subset": None}
    elif evaluation.source is not None:
        elsewhere = {"source": evaluation.source, "subset": evaluation.subset}
    if elsewhere:
        elsewhere |= {"sources": (), "revision": None, "filter": ()}
    return dict(config.data) | {"split": evaluation.split} | elsewhere | given


def eval_config(config: "RunConfig", asked: EvaluationSet) -> EvalConfig:
    """What an evaluation of a set measures; when it does, and what follows, is no part of it.

    Raises:
        ValueError: for fields of its data or its reward that do not fit; names the set.
    """
    if asked.inspect:
        return _inspect_config(config, asked)
    one_draw: dict[str, object] = {"num_oversampled_prompts": 0, "partial_rollouts": False, "max_draws": 1}
    one_draw |= {"curriculum": "none", "pass_rate_between": None}
    fields = _fields(config, asked) | {"num_prompts": asked.num_prompts} | one_draw
    if asks_own_rows(config, asked):
        _check_own_rows(config, asked)
        fields |= {"part": "held_out", "num_held_out": num_held_out(config)}
        fields |= {} if config.data.is_single_file else {"split": config.data.split}
    try:
        data, reward = DataPart.model_validate(fields), _reward(config, asked)
    except ValidationError as error:
        raise ValueError(f"{place_of(asked.name)}data or reward: {_found(error)}") from error
    return EvalConfig(
        data=data,
        reward=reward,
        top_p=asked.top_p or 1.0,
        environment=_environment(config, asked, reward),
        **_how_asked(config, asked),
    )


def _how_asked(config: "RunConfig", asked: EvaluationSet) -> dict[str, Any]:  # Any: fields of EvalConfig
    return {
        "pass_reward": asked.pass_reward or 0.0,
        "max_output_tokens": asked.max_output_tokens or config.sampling.max_output_tokens,
        "num_samples": asked.num_samples or 0,
        "temperature": asked.temperature or 1.0,
        "pass_at_k": tuple(sorted(set(asked.pass_at_k or ()))),
        "name": asked.name,
        "has_greedy": asked.greedy is not False,
    }


def _inspect_config(config: "RunConfig", asked: EvaluationSet) -> EvalConfig:
    """Raises ValueError for fields that a task of inspect-ai has itself, or cannot have."""
    if given := [name for name in ("data", "reward", "environment") if getattr(asked, name)]:
        raise ValueError(f"{place_of(asked.name)}{given[0]} with inspect {asked.inspect!r}: the task has its own, leave it out")
    if asked.top_p not in (None, 1.0):
        raise ValueError(
            f"{place_of(asked.name)}top_p {asked.top_p:g} with inspect {asked.inspect!r} is not supported: leave it out"
        )
    return EvalConfig(
        data=DataPart(num_prompts=asked.num_prompts or 1),
        reward=RewardConfig(max_unjudged_frac=config.reward.max_unjudged_frac, environment=config.reward.environment),
        inspect=asked.inspect or "",
        inspect_timeout_s=config.evaluation.inspect_timeout_s,
        **_how_asked(config, asked),
    )


def _found(error: ValidationError) -> str:
    found = [(".".join(map(str, each["loc"])), each) for each in error.errors()]
    return "; ".join(
        f"{place!r} is no field of theirs" if each["type"] == "extra_forbidden" else f"{place} {each['input']!r}: {each['msg']}"
        for place, each in found
    )


def _check_own_rows(config: "RunConfig", asked: EvaluationSet) -> None:
    if chosen := [name for name in asked.data if name not in (*HOW_SHOWN, "source")]:
        raise ValueError(
            f"evaluation.sets {asked.name!r} asks rows of {config.data.source!r} that are held out, and its data has {chosen[0]!r}, which would "
            f"choose others: name another source, or leave it out (it may have {', '.join(HOW_SHOWN)})"
        )


def _environment(config: "RunConfig", asked: EvaluationSet, reward: RewardConfig) -> PlayedEnvironment | None:
    """Return the set's own environment, else that of the run; a set with a reward of its own has none.

    Raises:
        ValueError: for a set that names both, or whose environment does not fit.
    """
    given, has_reward = asked.environment, asked.reward is not None or asked.name in READY
    if given and has_reward:
        raise ValueError(
            f"{place_of(asked.name)}environment {given!r} with a reward of its own: an environment gives the rewards, leave one out"
        )
    fields = _played_fields(asked)
    none: dict[str, Any] = {"name": "", "command": (), "id": "", "kind": None, "mcp": ()}
    none = none if has_reward or given == "" or {"name", "command", "id"} & set(fields) else {}
    try:
        played = PlayedEnvironment.model_validate(
            dict(config.environment) | none | fields | {"max_failed_frac": reward.max_unjudged_frac}
        )
    except ValidationError as error:
        raise ValueError(f"{place_of(asked.name)}environment: {_found(error)}") from error
    if not played.label:
        return None
    if asked.top_p not in (None, 1.0):
        raise ValueError(
            f"{place_of(asked.name)}top_p {asked.top_p:g} with environment {played.label!r} is not supported: leave it out"
        )
    return played


def _played_fields(asked: EvaluationSet) -> dict[str, Any]:
    """The fields of the section `environment` that a set has for itself. `verifiers:ID` is a taskset, other text a name."""
    given = asked.environment
    if not isinstance(given, str):
        return given or {}
    taskset = taskset_of(given)
    return {"name": given} if taskset is None else {"id": taskset}


def _reward(config: "RunConfig", asked: EvaluationSet) -> RewardConfig:
    given = asked.reward
    if given is None and asked.name in READY:
        given = READY[asked.name].reward
    fields = {"name": given} if isinstance(given, str) else given or {}
    own = {"functions": ()} if "name" in fields else {}
    return RewardConfig.model_validate(dict(config.reward) | own | fields | {"shuffle_seed": None})
