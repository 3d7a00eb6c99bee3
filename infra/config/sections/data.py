"""The section `data`: where prompts come from, and which rows of a data set are meant."""

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config.sections.data_source import MIXED, DataSource
from infra.config.sections.environments import taskset
from infra.config.tools.base import ConfigBase
from infra.config.tools.conditions import condition_of

ARITHMETIC = "arithmetic"
FILE_KINDS = (".jsonl", ".json", ".parquet")
"""Of local data files."""


class DataConfig(ConfigBase):
    """Where prompts come from."""

    source: str = ARITHMETIC
    """`arithmetic` (generated word problems), a Hugging Face hub id (`openai/gsm8k`), a local JSONL or Parquet file or folder, or
    `verifiers:ID`, the tasks of a taskset of verifiers (environment.id)."""
    sources: tuple[str, ...] = ()
    """Several sources in place of one, each a value as of data.source, with options of its own behind a question mark:
    `mine.jsonl?weight=2&answer_column=solution`. weight is its share of the prompts; without any weights shares are as the numbers of rows.
    Further options: subset, revision, split, question_column, answer_column, messages_column, tools_column, assistant_turn, filter.
    A part is held out for evaluations, unless evaluation.source is given."""
    subset: str | None = None
    """The hub data set's configuration, such as `main` for GSM8K; of a local folder, the folder in it that has the files."""
    revision: str | None = None
    """Branch, tag or commit of the hub data set; None: the newest."""
    split: str = "train"
    """Split on the hub, or files of a folder (train.jsonl). A single file or a taskset has none: a part of it is held out for
    evaluations by itself."""
    hold_out: bool = False
    """Hold out a part of the rows for evaluations, as of a single file: for hub data sets and folders without a split for them. Without effect
    where evaluation.source is given."""
    held_out_seed: int = 0
    """Seed of the hash that chooses the held-out rows: min(evaluation.num_prompts, a quarter of the rows), never trained on.
    Rows of equal text stay together. None are held out where evaluation.every is 0 or evaluation.source is another data set."""
    question_column: str = "question"
    """Column of the prompts, each one text or a list of chat messages. Where there is none of this name, the layouts of verl (prompt,
    reward_model), of TRL (prompt) and a column `messages` are recognised; `ratchet data` says which."""
    answer_column: str = "answer"
    """Column of the answers: text, or an integer, a float or a bool, which the reward gets as JSON writes it (42, 0.5, true). A data set may have
    none, for rewards that take none or have a default for it; of verl's layout it is reward_model.ground_truth."""
    messages_column: str | None = None
    """Column of lists of chat messages (role, content), in place of question_column. None: as question_column says."""
    tools_column: str = "tools"
    """Column of the tools that a chat template is to describe: a list of JSON schemas, or its JSON as text. Without effect where there is none."""
    assistant_turn: Literal["prefix", "answer"] = "prefix"
    """What a last message of the assistant is. prefix: the beginning of the answer, which the model continues; answer: the right answer of
    a whole conversation, which is taken off the prompt, and is the row's answer where there is no answer column."""
    template: str = "chat"
    """chat: the model's chat template; raw: none, the tokenizer's own special tokens alone; else a Jinja file, which gets messages, tools, row
    (all columns), the special tokens and add_generation_prompt."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Further variables of the template, each NAME=VALUE with the value in JSON or as bare text, such as enable_thinking=false."""
    filter: tuple[str, ...] = ()
    """Conditions that a row has to meet, all of them: a column, one of == != < <= > >= in, and a value, such as level >= 3,
    lang in en,de or extra_info.split == train. The value is JSON or bare text; a text equals what is written alike."""
    instruction: str = ""
    """Put behind each question, or behind the last message of the user, after one blank."""
    num_prompts: int = Field(default=16, ge=1)
    """Prompts (= groups) per step."""
    num_oversampled_prompts: int = Field(default=0, ge=0)
    """Prompts drawn besides. A rollout ends when num_prompts whole groups are there, whichever; the rest is aborted and not used.
    Shortens the wait for the longest answers, at a price: groups with long answers are left out more often."""
    max_draws: int = Field(default=1, ge=1, le=99)
    """Dynamic sampling: most draws of a step. Groups whose rewards are all equal teach nothing; above 1, further prompts are drawn, sampled and
    scored until num_prompts groups with different rewards are there: as the reward gave them, to whole episodes, before an overlong penalty. A
    draw has num_prompts prompts, a later one as few as should do by the share of useful groups so far. 1: one draw, also of groups that teach
    nothing. Source: DAPO, arXiv 2503.14476, section 3.2."""
    curriculum: Literal["none", "uncertain", "between"] = "none"
    """How rows are drawn. none: shuffled, pass after pass; uncertain: with weight p(1 - p) of each row's measured pass rate p, as in arXiv
    2502.12272; between: only rows with a measured pass rate in data.pass_rate_between, as in arXiv 2504.03380, and rows that were
    not measured yet. The pass rate is the mean reward of the row's newest group, each reward cut to 0 to 1."""
    pass_rate_between: tuple[float, float] | None = None
    """Lowest and highest pass rate of rows that data.curriculum 'between' draws, 0 to 1, such as [0.1, 0.9]; None with any other curriculum."""
    partial_rollouts: bool = False
    """What is aborted is used: the next step begins with those groups, goes on with their answers, and does not end without them. So no
    group is left out, and no token is more than one RL step old; needs a kind of trainer.loss.correction, since those tokens are another
    adapter's. Source: Kimi k1.5, arXiv 2501.12599, section 2.6."""
    allow_repeats: bool = False
    """Let a step hold the same row several times, for data sets of fewer rows than a step has prompts, and the same text in more than half of
    its prompts. False: both are errors. Several passes over the data are always possible."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt, chat template included; too_long says what becomes of longer ones."""
    too_long: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with prompts of more than max_prompt_tokens. error: stop before the run; drop: leave their rows out; truncate_left: keep their
    last max_prompt_tokens tokens, which may cut into the template. `ratchet data` and the step's report say how many there are."""

    @property
    def template_file(self) -> Path | None:
        """The Jinja file in place of the model's chat template; None: there is none."""
        return None if self.template in ("chat", "raw") else Path(os.path.expanduser(self.template))

    @property
    def template_variables(self) -> dict[str, object]:
        return dict(_variable(text) for text in self.chat_template_kwargs)

    @field_validator("source")
    @classmethod
    def _taskset_has_a_name(cls, source: str) -> str:
        if (name := taskset.taskset_of(source)) is not None:
            taskset.check_name(name)
        return source

    @field_validator("filter")
    @classmethod
    def _conditions_have_their_form(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            condition_of(text)
        return texts

    @model_validator(mode="after")
    def _template_gets_its_variables(self) -> Self:
        for text in self.chat_template_kwargs:
            _variable(text)
        if self.chat_template_kwargs and self.template == "raw":
            raise ValueError(f"chat_template_kwargs {self.chat_template_kwargs[0]!r} with template 'raw': no template gets it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _several_sources_have_one_name(cls, content: Any) -> Any:  # Any: what pydantic gets
        if isinstance(content, dict) and content.get("sources") and content.get("source", ARITHMETIC) == ARITHMETIC:
            return content | {"source": MIXED}
        return content

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        if bool(self.sources) != (self.source == MIXED):
            given = f"data.sources {list(self.sources)} with data.source {self.source!r}"
            raise ValueError(f"{given}: give one of the two" if self.sources else f"data.source {MIXED!r} needs data.sources")
        given_weights = [DataSource.parse(text).weight is not None for text in self.sources]
        if any(given_weights) and not all(given_weights):
            raise ValueError(
                f"data.sources {self.sources[given_weights.index(False)]!r} has no weight, others have: give all or none"
            )
        _ = self.parts  # each is checked
        return self

    @model_validator(mode="after")
    def _curriculum_fits(self) -> Self:
        kind, interval = self.curriculum, self.pass_rate_between
        if (interval is not None) != (kind == "between"):
            wrong = f"data.pass_rate_between {list(interval)}" if interval else "no data.pass_rate_between"
            raise ValueError(f"data.curriculum {kind!r} with {wrong}: give it with 'between', and with 'between' alone")
        if interval and not 0 <= interval[0] < interval[1] <= 1:
            raise ValueError(f"data.pass_rate_between {list(interval)} is no interval: take two rising numbers from 0 to 1")
        if kind == "none":
            return self
        others = {"data.sources": list(self.sources), "data.allow_repeats": self.allow_repeats}
        for field, value in (others | {"data.partial_rollouts": self.partial_rollouts}).items():
            if value:
                raise ValueError(f"data.curriculum {kind!r} with {field} {value} is not supported: take one of the two")
        return self

    @property
    def parts(self) -> "tuple[DataConfig, ...]":
        """The section for each of several sources; empty where there is one."""
        mine = {name: getattr(self, name) for name in DataConfig.model_fields} | {"sources": ()}
        parsed = map(DataSource.parse, self.sources)
        return tuple(DataConfig.model_validate(mine | {"source": each.source} | each.fields) for each in parsed)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of several sources; empty where shares are as their numbers of rows."""
        return tuple(weight for text in self.sources if (weight := DataSource.parse(text).weight) is not None)

    @property
    def is_single_file(self) -> bool:
        """Whether it has no splits; a taskset has none either. By its name alone, so that an old configuration means the same after its file was
        moved."""
        return taskset.taskset_of(self.source) is not None or Path(self.source).suffix in FILE_KINDS


def _variable(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"chat_template_kwargs {text!r} is no NAME=VALUE, such as enable_thinking=false")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


class DataPart(DataConfig):
    """A data set and which of its rows are meant, as used by RunConfig.training and EvalConfig.data."""

    part: Literal["all", "training", "held_out"] = "all"
    num_held_out: int = 0
    """Rows to hold out, a quarter of the rows at most."""
    evaluated: tuple[DataConfig, ...] = ()
    """Of training rows: other data sets, which evaluations ask; rows whose text is in one of them are not trained on."""
