"""Evaluations: when, on what, and what follows from them."""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl

from pydantic import Field, WithJsonSchema, model_validator

from infra.config.sections.data import DataPart
from infra.config.sections.rewards.reward import RewardConfig
from infra.config.sections.sampling import PlayedEnvironment, SamplingConfig
from infra.config.tools.base import ConfigBase, json_or_text

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


class EvalSamplingConfig(SamplingConfig):
    """Sampling of an evaluation, which may also take the likeliest token each time, or sample from the nucleus: nothing is trained on it."""

    temperature: float = Field(default=0.0, ge=0)
    """0: the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the nucleus; 1: all tokens."""

    @property
    def nucleus(self) -> float:
        return self.top_p

    @property
    def is_for_training(self) -> bool:
        return False


class EvalConfig(ConfigBase):
    """An evaluation of one set with every value resolved: figures of equal configurations can be compared."""

    data: DataPart
    """num_prompts questions of it are asked, the same ones in every run."""
    reward: RewardConfig
    pass_reward: float
    max_output_tokens: int
    num_samples: int
    temperature: float
    pass_at_k: tuple[int, ...]
    name: str = ""
    """The set's name; empty where a run has only the one of the section `evaluation`."""
    has_greedy: bool = True
    top_p: float = 1.0
    environment: PlayedEnvironment | None = None
    """Answers are episodes with it, and have its rewards. None: an answer is one turn, and has the reward's."""
    inspect: str = ""
    """A task of inspect-ai, which has the questions and the scores: of data and reward only num_prompts and the share that may be unjudged count."""
    inspect_timeout_s: float = 3600.0

    @property
    def greedy(self) -> EvalSamplingConfig | None:
        """None where only sampled answers are asked for."""
        return EvalSamplingConfig(group_size=1, max_output_tokens=self.max_output_tokens) if self.has_greedy else None

    @property
    def sampled(self) -> EvalSamplingConfig | None:
        """None where only greedy answers are asked for."""
        if not self.num_samples:
            return None
        return EvalSamplingConfig(
            group_size=self.num_samples,
            temperature=self.temperature,
            max_output_tokens=self.max_output_tokens,
            top_p=self.top_p,
        )


class EvaluationSet(ConfigBase):
    """One of several evaluation sets. None: as the section `evaluation` says."""

    name: str
    data: dict[str, Any] = Field(default_factory=dict)  # Any: JSON, checked as the section `data`
    reward: str | dict[str, Any] | None = None
    environment: str | dict[str, Any] | None = None
    inspect: str | None = None
    every: int | None = Field(default=None, ge=1)
    num_prompts: int | None = Field(default=None, ge=1)
    greedy: bool | None = None
    num_samples: int | None = Field(default=None, ge=0)
    pass_at_k: tuple[int, ...] | None = None
    temperature: float | None = Field(default=None, gt=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    pass_reward: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_has_options(cls, content: Any) -> Any:  # Any: what pydantic gets
        return _parsed(content) if isinstance(content, str) else content


def _parsed(text: str) -> dict[str, Any]:
    """`gsm8k?num_prompts=200&source=test.jsonl` -> the fields of a set. What is no field of a set is one of its data."""
    name, _, options = text.partition("?")
    fields: dict[str, Any] = {"name": name}
    data: dict[str, Any] = {}
    for option, value in parse_qsl(options, keep_blank_values=True):
        place = fields if option in EvaluationSet.model_fields else data
        place[option] = (
            json_or_text(value) if place is fields or option not in ("source", "subset", "split", "revision") else value
        )
    return fields | {"data": data} if data else fields


_INT, _FLOAT = {"type": ["integer", "null"]}, {"type": ["number", "null"]}
_OF_SET: dict[str, Any] = {  # Any: JSON schema
    "name": {"type": "string"},
    "data": {"type": "object"},
    "reward": {"type": ["string", "object", "null"]},
    "environment": {"type": ["string", "object", "null"]},
    "inspect": {"type": ["string", "null"]},
    "greedy": {"type": ["boolean", "null"]},
    "pass_at_k": {"type": ["array", "null"], "items": {"type": "integer"}},
    **dict.fromkeys(("every", "num_prompts", "num_samples", "max_output_tokens"), _INT),
    **dict.fromkeys(("temperature", "top_p", "pass_reward"), _FLOAT),
}
OneOfSets = Annotated[EvaluationSet, WithJsonSchema({"type": ["object", "string"], "properties": _OF_SET, "required": ["name"]})]
"""With a schema that stands by itself: the form has no definitions."""

AS_OF_SECTION = (
    *("num_prompts", "greedy", "num_samples", "pass_at_k", "temperature", "top_p", "max_output_tokens", "pass_reward"),
)
"""Fields of a set that are those of the section `evaluation` where it leaves them out; so `every`."""

DECIDE_HELD_OUT = ("evaluation.every", "evaluation.num_prompts", "evaluation.source", "evaluation.sets")
"""Fields that decide how many rows are held out."""
DECIDE_TRAINED = (*DECIDE_HELD_OUT, "evaluation.subset", "evaluation.split")
"""Fields that decide which rows are not trained on, because an evaluation asks them."""


class EvaluationConfig(ConfigBase):
    """How good the adapter is on questions that are not trained on, and what follows from it."""

    every: int = Field(default=5, ge=0)
    """Steps between two evaluations of a run; besides, one before training and one at the end. 0: none at all, and no row of a single data file
    is held out."""
    source: str | None = None
    """As data.source; None: data.source itself."""
    subset: str | None = None
    """As data.subset; where source is None, data.subset is taken."""
    split: str = "test"
    """As data.split; without effect for a single file, of which a part is held out (data.held_out_seed)."""
    num_prompts: int = Field(default=64, ge=1)
    """Held-out questions, the same ones each time; all of them where there are fewer. Of a single file a quarter of the rows at most."""
    greedy: bool = True
    """Ask for the likeliest answer to each question. false: only the sampled ones, of which pass@1 and mean reward are then."""
    num_samples: int = Field(default=0, ge=0)
    """Sampled answers to each question, for pass@k and mean@n; 0: only the greedy one, for pass@1."""
    pass_at_k: tuple[int, ...] = ()
    """Each k of pass@k, none above num_samples."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampled answers."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the nucleus from which these answers are sampled; 1: all tokens."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """None: sampling.max_output_tokens."""
    pass_reward: float = 1.0
    """An answer with this reward or more passes."""
    sets: tuple[OneOfSets, ...] = ()
    """Several named sets, in place of the one that the fields above describe: a list such as ["gsm8k?num_prompts=200", {"name": "mine",
    "data": {"source": "test.jsonl"}, "reward": "mine.py:score", "every": 10}]. Further fields of a set: greedy, num_samples, pass_at_k,
    temperature, top_p, max_output_tokens, pass_reward, and environment (a name or fields of that section; "" is none). What a set leaves out is
    as of these sections, but a set with a reward has no environment. Ready sets are gsm8k, math-500, aime-2024 and aime-2025: their names fill in
    data and reward. inspect names a task of inspect-ai, such as "FILE.py@TASK" or "PACKAGE/TASK", which has its own questions and scores; its first
    num_prompts questions are asked. The set of the fields above is written {"name": "held-out"}, or any other name."""
    inspect_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a set of inspect-ai is ended that is not done, for the greedy answers and again for the sampled ones."""
    patience: int | None = Field(default=None, ge=1)
    """Evaluations in a row without a better result after which the run ends; None: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """With patience: better means better by more than this, in the metric of best_by."""
    best_by: str = "auto"
    """Metric by which the best adapter is chosen and progress is measured: pass_at_1, mean_reward, mean_output_tokens, truncated_frac,
    sampled_pass_at_1, pass_at_<k> with k of pass_at_k, or mean_at_<n> with n = num_samples. Of several sets the first one's, or that of a set by
    its name: aime-2024/mean_at_16. auto: pass_at_1 where each reward was 0 or 1, else mean_reward."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of best_by is the best."""

    @property
    def asked(self) -> tuple[EvaluationSet, ...]:
        """The sets with every value filled in but data and reward: the named ones, or the one of this section, whose name is empty."""
        return tuple(map(self._filled, self.sets)) or (self._filled(EvaluationSet(name="")),)

    def _filled(self, asked: EvaluationSet) -> EvaluationSet:
        given = {name: value for name, value in asked if value is not None}
        if asked.num_samples is not None and asked.pass_at_k is None:
            given["pass_at_k"] = tuple(dict.fromkeys((1, asked.num_samples))) if asked.num_samples else ()
        of_section = {name: getattr(self, name) for name in AS_OF_SECTION} | {"every": self.every or None}
        return asked.but(**of_section | given)

    @property
    def deciding(self) -> tuple[str, str]:
        """Name of the set by which the best adapter is chosen, and its metric."""
        name, slash, metric = self.best_by.rpartition("/")
        return name if slash else self.asked[0].name, metric

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        names = [each.name for each in self.sets]
        for name in names:
            if not SET_NAME.fullmatch(name) or names.count(name) > 1:
                why = "is there twice" if names.count(name) > 1 else "must be 1 to 40 letters, digits, '.', '_' or '-'"
                raise ValueError(f"evaluation.sets: name {name!r} {why}")
        for asked in self.asked:
            _check_samples(asked)
        _check_best_by(self)
        if self.patience is not None and not self.every:
            raise ValueError(f"evaluation.patience {self.patience} needs evaluations: set evaluation.every to 1 or more")
        return self


def _check_samples(asked: EvaluationSet) -> None:
    place, num_samples, pass_at_k = place_of(asked.name), asked.num_samples or 0, asked.pass_at_k or ()
    if wrong := [k for k in pass_at_k if not 1 <= k <= num_samples]:
        raise ValueError(
            f"{place}pass_at_k {wrong[0]} needs as many samples or more of each question: {place}num_samples is {num_samples}"
        )
    if num_samples and not pass_at_k:
        raise ValueError(
            f"{place}num_samples {num_samples} without pass_at_k: name a k, such as (1, {num_samples}), or leave it 0"
        )
    if not asked.greedy and not num_samples:
        raise ValueError(f"{place}greedy false with num_samples 0 asks for no answer: set one of them")


def place_of(name: str) -> str:
    """The beginning of a field's name in a message."""
    return f"evaluation.sets {name!r} " if name else "evaluation."


def _check_best_by(config: EvaluationConfig) -> None:
    known: list[str] = []
    for asked in config.asked:
        metrics = _metrics_of(asked)
        known += [] if known else metrics
        known += [f"{asked.name}/{metric}" for metric in metrics] if asked.name else []
    if config.best_by not in known:
        raise ValueError(
            f"evaluation.best_by {config.best_by!r} is not measured; with this pass_at_k choose one of {', '.join(known)}"
        )


def _metrics_of(asked: EvaluationSet) -> list[str]:
    sampled = ["sampled_pass_at_1" if k == 1 else f"pass_at_{k}" for k in asked.pass_at_k or ()]
    mean = [f"mean_at_{asked.num_samples}"] if asked.num_samples else []
    return ["auto", "pass_at_1", "mean_reward", *sampled, *mean, "mean_output_tokens", "truncated_frac"]
