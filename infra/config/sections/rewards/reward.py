"""The section `reward`: which function scores the samples, and which model judges them."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from infra.config.sections.rewards.judge_server import JudgeServerConfig, check_own_model
from infra.config.sections.rewards.reward_model import RewardModelConfig
from infra.config.tools.base import ConfigBase

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOW_REWARDS_RUN = {
    *("timeout_s", "task_timeout_s", "cpu_s", "workers", "memory_mib", "environment", "concurrency", "max_unjudged_frac"),
}
"""Fields that do not decide what a sample gets."""
HOW_JUDGES_ARE_ASKED = {
    *("base_url", "timeout_s", "concurrency", "max_attempts", "retry_delay_s"),
    *("input_price", "output_price", "max_run_tokens", "max_run_cost"),
}
"""The same of the section `reward.judge`."""
JUDGED_BY_MODEL = ("rubric", "ruler")
"""Rewards that a model gives."""
REWARD_MODEL = "reward_model"
"""The reward by a model with a head that gives a number."""
RUBRIC_KINDS = (".txt", ".md")
"""What names of files with a rubric end in."""


class RewardFunction(ConfigBase):
    """One of several rewards."""

    name: str
    """As reward.name."""
    weight: float = 1.0
    """What its reward is multiplied by before the sum."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the parts of a dict that it returns, by name; 1 where a part has none."""

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        if self.weights and self.name in (*JUDGED_BY_MODEL, REWARD_MODEL):
            raise ValueError(
                f"reward.functions {self.name!r} with weights {self.weights}: its score has no parts, set weight instead"
            )
        return self

    @property
    def label(self) -> str:
        """The function's name, without file or module."""
        return re.split(r"[:.]", self.name)[-1]


OneOfSeveral = Annotated[
    RewardFunction,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "weight": {"type": "number"},
                "weights": {"type": "object", "additionalProperties": {"type": "number"}},
            },
            "required": ["name"],
        }
    ),
]
"""With a schema that stands by itself: the form has no definitions."""


class JudgeConfig(ConfigBase):
    """The model that judges samples, for the rewards `rubric` and `ruler`. Its key is the environment variable RATCHET_JUDGE_API_KEY."""

    by: Literal["endpoint", "engine", "model"] = "endpoint"
    """Who judges. engine: the run's own engine, with the base model or with the adapter of `adapter`; it needs no base_url and no model. model: a
    second model in a server that Ratchet starts, which takes turns with the engine and the trainer (docs/colocation.md)."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter that judges, with by engine. Its base model must be the run's, its rank at most engine.max_lora_rank, and
    its targets among trainer.lora.target_modules. Empty: the base model judges."""
    base_url: str = ""
    """Address of an OpenAI-compatible endpoint up to /v1, such as https://api.openai.com/v1; it gets POST .../chat/completions. Never with a key
    in it."""
    model: str = ""
    """Name of the model, as the endpoint has it. Judgements are found again by it: another model needs another name. With by model: a Hugging
    Face folder or a hub id; its judgements are found again by its files' digest."""
    rubric: str = ""
    """What the judge is told, or a file with it (.txt, .md). For the reward rubric a template with {question}, {answer}, {completion} and
    {row[COLUMN]}, and braces of its own doubled; {completion} is required. For ruler the grading standards; empty: those of ART."""
    min_score: float = 0.0
    """Lowest score that the judge may give. With ruler 0."""
    max_score: float = 1.0
    """Highest score; the reward is the score as it is. With ruler 1."""
    answer: Literal["auto", "json_schema", "text"] = "auto"
    """How the judge gives its score. json_schema: JSON by a schema that the endpoint enforces; text: JSON that the prompt asks for; auto:
    json_schema, or text where the endpoint refuses it. Both are parsed strictly: what does not fit is unjudged."""
    score_pattern: str = ""
    """For the reward rubric: a regular expression that must match the judge's answer just once; its first group is the score, such as
    Score: ([0-9.]+). Empty: the answer is JSON."""
    num_votes: int = Field(default=1, ge=1, le=64)
    """Judgements of each sample, or of each group with ruler. More than half of them must be readable."""
    vote_by: Literal["mean", "median"] = "mean"
    """How votes become one score."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge's sampling. Several votes need more than 0."""
    max_output_tokens: int = Field(default=1024, ge=1)
    """Longest answer of the judge, in tokens; reasoning models need room."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one answer, in seconds."""
    concurrency: int = Field(default=16, ge=1)
    """Requests that are under way at once."""
    max_attempts: int = Field(default=5, ge=1)
    """Attempts at a request that fails by HTTP 408, 409, 425, 429 or 5xx, a time-out or a lost connection. Other 4xx are not tried again."""
    retry_delay_s: float = Field(default=1.0, gt=0)
    """Wait before the second attempt, in seconds; it doubles with each one. Retry-After of the endpoint comes first."""
    input_price: float = Field(default=0.0, ge=0)
    """Price of a million input tokens, in your currency. 0: unknown."""
    output_price: float = Field(default=0.0, ge=0)
    """Price of a million output tokens. 0: unknown."""
    max_run_tokens: int = Field(default=0, ge=0)
    """Tokens, input and output, that the judge may take in the whole run: then the step stops. 0: no limit."""
    max_run_cost: float = Field(default=0.0, ge=0)
    """The same in money, by the prices. 0: no limit."""
    server: JudgeServerConfig = JudgeServerConfig()

    @property
    def rubric_file(self) -> Path | None:
        """The file with the rubric. None: the rubric is the text."""
        return Path(os.path.expanduser(self.rubric)) if self.rubric.endswith(RUBRIC_KINDS) and "\n" not in self.rubric else None

    @model_validator(mode="after")
    def _address_holds_no_secret(self) -> Self:
        parts = urlsplit(self.base_url)
        if parts.username or parts.password or parts.query:  # no rule of the field, whose errors show the value
            raise ValueError(
                "reward.judge.base_url holds a user, a password or a query, and the address is written to files: take it out and set "
                "RATCHET_JUDGE_API_KEY"
            )
        return self

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"reward.judge.base_url {url!r} is no address: give one such as http://127.0.0.1:8000/v1")
        return url.rstrip("/")

    @field_validator("score_pattern")
    @classmethod
    def _pattern_has_a_group(cls, pattern: str) -> str:
        try:
            has_group = not pattern or re.compile(pattern).groups >= 1
        except re.error as error:
            raise ValueError(f"reward.judge.score_pattern {pattern!r} is no regular expression: {error}") from None
        if not has_group:
            raise ValueError(
                f"reward.judge.score_pattern {pattern!r} has no group: put the score in parentheses, as in Score: ([0-9]+)"
            )
        return pattern

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if not self.min_score < self.max_score:
            raise ValueError(f"reward.judge.min_score {self.min_score:g} is not below max_score {self.max_score:g}")
        if self.adapter and self.by != "engine":
            raise ValueError(
                f"reward.judge.adapter {self.adapter!r} with reward.judge.by {self.by!r}: an adapter is served by the run's own engine, set by to "
                "'engine'"
            )
        if self.num_votes > 1 and not self.temperature:
            raise ValueError(
                f"reward.judge.num_votes {self.num_votes} with temperature 0: all votes would be equal, set temperature such as 0.7"
            )
        if self.max_run_cost and not (self.input_price or self.output_price):
            raise ValueError(
                f"reward.judge.max_run_cost {self.max_run_cost:g} without prices: set input_price and output_price, per million tokens"
            )
        return self


class RewardConfig(ConfigBase):
    """Which function scores the samples."""

    name: str = "gsm8k_numeric"
    """A built-in reward, a function in a file (`mine.py:score`, from where the command runs), or a dotted path (`my_module.my_reward`). With
    rubric a model gives each sample a score, with ruler it compares those of a group: see reward.judge. With reward_model the model of
    reward.model scores it. Rows by which a built-in one cannot judge are refused before the run: those for GSM8K need answers that are a
    number, or end in `#### 42`."""
    functions: tuple[OneOfSeveral, ...] = ()
    """Several rewards, in place of name: a list such as [{"name": "gsm8k_numeric"}, {"name": "mine.py:short", "weight": 0.2}]. The reward is the
    sum of theirs times their weights, and each is a part. A sample that one of them cannot judge is unjudged. "weights" are those of the parts
    of a dict that the function returns, without a key `reward`; each part that has one must be there, others count once."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one sample, in seconds; for one call of a function that takes a batch, and for one batch of a reward model. A sample
    that takes longer is tried once more, then it is unjudged. The built-in rewards for GSM8K run in the flow's process and need none of this
    and the next six fields."""
    task_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time for all samples of a step, a draw or an evaluation, in seconds. It begins when the rollout has ended, and holds for functions,
    judges and reward models together; what an engine needs to load another adapter is not cut. What has no result then is unjudged. None: no
    limit."""
    cpu_s: int | None = Field(default=None, ge=1)
    """CPU time that one sample may use in its worker, in whole seconds; for one call of a function that takes a batch. It may get up to a second
    more. A sample that uses more is unjudged, and is not tried again. None: no limit."""
    workers: int | None = Field(default=None, ge=1)
    """Processes that call the reward. None: one for each core, 16 at most."""
    memory_mib: int = Field(default=4096, ge=128)
    """Memory that a worker may use, in MiB; more is a MemoryError in the reward."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the reward needs; it gets no others but PATH, HOME, locale, PYTHONPATH and the like. Values stay in
    the environment."""
    concurrency: int = Field(default=16, ge=1)
    """Calls of an async reward that are under way at once."""
    max_unjudged_frac: float = Field(default=0.05, ge=0, le=1)
    """Largest share of a step's samples that may be unjudged: above it the step stops and names them. An evaluation above it is not used to
    choose or to compare. Range 0 to 1."""
    shuffle_seed: int | None = None
    """A control, not for use: the rewards of each step change places among its samples, so that they say nothing about them."""
    judge: JudgeConfig = JudgeConfig()
    model: RewardModelConfig = RewardModelConfig()

    @field_validator("environment")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if any(not VARIABLE.fullmatch(name) for name in names):
            raise ValueError(
                "reward.environment holds something that is no variable's name: give names alone, such as MY_KEY, never values"
            )
        return names

    @field_validator("functions")
    @classmethod
    def _have_labels(cls, functions: tuple[RewardFunction, ...]) -> tuple[RewardFunction, ...]:
        labels = [function.label for function in functions]
        if double := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(
                f"reward.functions has two functions of the name {double[0]!r}, which is that of their part: rename one"
            )
        return functions

    @model_validator(mode="after")
    def _judge_is_known(self) -> Self:
        used = [function.name for function in self.called if function.name in JUDGED_BY_MODEL]
        if len(used) > 1:
            raise ValueError("reward.functions has rubric and ruler, which share reward.judge.rubric: take one of them")
        if not used:
            return self
        (found,) = used
        judge = self.judge
        if judge.by == "engine" and (judge.base_url or judge.model):
            raise ValueError("reward.judge.by 'engine' with base_url or model: the base model of the run judges, leave them out")
        if judge.by == "model":
            check_own_model(judge)
        needed = ("base_url", "model") if judge.by == "endpoint" else ()
        if missing := next((name for name in needed if not getattr(judge, name)), None):
            raise ValueError(
                f"reward {found!r} needs reward.judge.{missing}: set the address and the name of the model that judges"
            )
        if found == "rubric" and not judge.rubric:
            raise ValueError("reward 'rubric' needs reward.judge.rubric: a text with {completion} in it, or a file with one")
        if found == "ruler" and (judge.score_pattern or (judge.min_score, judge.max_score) != (0.0, 1.0)):
            raise ValueError(
                "reward 'ruler' gives scores from 0 to 1 as JSON: leave out reward.judge.min_score, max_score and score_pattern"
            )
        return self

    @model_validator(mode="after")
    def _model_is_named(self) -> Self:
        if self.uses_reward_model and not self.model.path:
            raise ValueError("reward 'reward_model' needs reward.model.path: the folder or the hub id of the model that scores")
        if self.uses_reward_model and (self.is_judged_by_engine or self.has_judge_server):
            raise ValueError(
                f"reward.functions has reward_model and a judge with reward.judge.by {self.judge.by!r}, which need the GPU one after the other: "
                "give the judge an endpoint"
            )
        return self

    @property
    def called(self) -> tuple[RewardFunction, ...]:
        """The functions that are called: reward.functions, or the one of reward.name."""
        return self.functions or (RewardFunction(name=self.name),)

    @property
    def is_judged_by_model(self) -> bool:
        """Whether one of the rewards is given by a model."""
        return any(function.name in JUDGED_BY_MODEL for function in self.called)

    @property
    def uses_reward_model(self) -> bool:
        """Whether one of the rewards is given by the model of reward.model."""
        return any(function.name == REWARD_MODEL for function in self.called)

    @property
    def is_judged_by_engine(self) -> bool:
        """Whether that model is the run's own engine."""
        return self.is_judged_by_model and self.judge.by == "engine"

    @property
    def has_judge_server(self) -> bool:
        """Whether that model is a second one, in a server that takes turns with the engine."""
        return self.is_judged_by_model and self.judge.by == "model"

    @property
    def compares_groups(self) -> bool:
        """Whether one of the rewards compares the samples of a group."""
        return any(function.name == "ruler" for function in self.called)

    @property
    def title(self) -> str:
        return ", ".join(function.name for function in self.called)
