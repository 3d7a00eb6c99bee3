"""The forms in which a reward may be written, told apart by its parameters, and how each is called.

def reward(*, completion, answer)                     one sample; takes what it names of NAMES
def reward(*, completions, rows)                      a batch; lists in, a list out
def reward(prompts, completions, **columns)           TRL's
def compute_score(data_source, solution_str, ground_truth, extra_info)      verl's
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

NAMES = (
    *("completion", "messages", "row", "question", "answer", "prompt_tokens", "output_tokens", "finish_reason"),
    *("group", "sample_index"),
)
"""What a reward of one sample may take."""
PLURALS = {
    "completions": "completion",
    "conversations": "messages",
    "rows": "row",
    "questions": "question",
    "answers": "answer",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "finish_reasons": "finish_reason",
}
"""What a batch reward may take, and what each list holds."""
WITH_COLUMNS = ("question", "completion", "answer", "row")
"""What a reward of one sample gets if it takes **columns."""
VERL = ("solution_str", "ground_truth")
TRL_COMPLETION_IDS = "completion_ids"
OF_TRAINER = {"trainer_state": None, "log_extra": lambda *args: None, "log_metric": lambda *args: None}
"""What TRL passes from its trainer: there is none here."""
OF_EVERY_CALL = ("prompts", "completions", "question", "answer", TRL_COMPLETION_IDS, *OF_TRAINER)
"""What a reward of TRL's form may take of any data set."""
Fields = dict[str, Any]
"""Of a sample, by NAMES."""
Kind = Literal["sample", "batch", "trl", "verl"]

ANSWER: dict[Kind, str] = {"sample": "answer", "batch": "answers", "trl": "answer", "verl": "ground_truth"}
"""The parameter with the row's answer, by form."""


class Form(NamedTuple):
    kind: Kind
    is_async: bool
    takes: tuple[str, ...]
    """Of NAMES: what a sample must hold."""
    named: tuple[str, ...]
    """The function's parameters."""
    required: tuple[str, ...]
    """Those without a default."""
    has_columns: bool
    """Whether it takes **columns."""

    @property
    def is_batch(self) -> bool:
        return self.kind in ("batch", "trl")

    @property
    def needs_answer(self) -> bool:
        """Whether it takes the row's answer, and has no default for it."""
        return ANSWER[self.kind] in self.required

    @property
    def needs_columns(self) -> list[str]:
        """Columns that every row must have: of TRL's form all parameters but what a trainer gives and what every row has."""
        return [each for each in self.required if self.kind == "trl" and each not in OF_EVERY_CALL]


def form_of(name: str, function: Callable[..., Any]) -> Form:
    """Read a reward's form off its parameters. Raises ValueError for parameters that no form has."""
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = [each.name for each in parameters if each.default is each.empty and each.name in named]
    has_columns = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if nameless := [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY and each.default is each.empty]:
        raise ValueError(f"reward {name!r} takes {nameless[0]!r} by position only: parameters are passed by name")
    kind = _kind_of(named, has_columns)
    takes = _taken(kind, named, has_columns)
    known = {"sample": NAMES, "batch": tuple(PLURALS)}.get(kind)
    unknown = [each for each in required if known and each not in known]
    if unknown or (kind == "sample" and not takes):
        what = f"a parameter {unknown[0]!r}" if unknown else "no parameters"
        raise ValueError(
            f"reward {name!r} has {what}: it must take some of the keywords {', '.join(NAMES)}; or {', '.join(PLURALS)} as lists; "
            "or be written as for TRL or verl"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004  # its kind
    return Form(kind, is_async, takes, tuple(named), tuple(required), has_columns)


def _kind_of(named: Sequence[str], has_columns: bool) -> Kind:
    if set(named).issuperset(VERL):
        return "verl"
    if not {"completions", "prompts", TRL_COMPLETION_IDS} & set(named):
        return "sample"
    return "trl" if has_columns or not set(named) <= set(PLURALS) else "batch"


def _taken(kind: Kind, named: Sequence[str], has_columns: bool) -> tuple[str, ...]:
    match kind:
        case "sample":
            found = {*named, *(WITH_COLUMNS if has_columns else ())}
            return tuple(each for each in NAMES if each in found)
        case "batch":
            return tuple(dict.fromkeys(PLURALS[each] for each in named if each in PLURALS))
        case "trl":
            return (*WITH_COLUMNS, *(("output_tokens",) if TRL_COMPLETION_IDS in named else ()))
        case "verl":
            return ("completion", "answer", "row")


def arguments_of_sample(form: Form, sample: Fields) -> Fields:
    """Return the keywords for one sample, in the forms `sample` and `verl`."""
    if form.kind == "sample":
        return {each: sample[each] for each in form.takes}
    row = sample["row"]
    model = row.get("reward_model")
    truth = model.get("ground_truth", sample["answer"]) if isinstance(model, dict) else sample["answer"]
    found = {
        "data_source": row.get("data_source", ""),
        "solution_str": sample["completion"],
        "ground_truth": truth,
        "extra_info": row.get("extra_info"),
    }
    return {each: value for each, value in found.items() if each in form.named or form.has_columns}


def arguments_of_batch(form: Form, samples: Sequence[Fields]) -> dict[str, Any]:
    """Return the keywords for many samples, in the forms `batch` and `trl`."""
    if form.kind == "batch":
        return {each: [sample[PLURALS[each]] for sample in samples] for each in form.named if each in PLURALS}
    rows = [{"question": sample["question"], "answer": sample["answer"], **sample["row"]} for sample in samples]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    found: dict[str, Any] = columns | {
        "prompts": [_prompt_of(row) for row in rows],
        "completions": [_completion_of(row, sample["completion"]) for row, sample in zip(rows, samples, strict=True)],
    }
    found.pop("prompt", None)
    if TRL_COMPLETION_IDS in form.named:
        found[TRL_COMPLETION_IDS] = [sample["output_tokens"] for sample in samples]
    found |= {name: value for name, value in OF_TRAINER.items() if name in form.named}
    return found if form.has_columns else {each: found[each] for each in form.named if each in found}


def value_of(form: Form, value: object) -> object:
    """Return a reward's value in our form: verl's dict has the reward as `score`, and may hold text besides."""
    if form.kind != "verl" or not isinstance(value, dict) or "score" not in value:
        return value
    return {"reward": value["score"]} | {
        name: each for name, each in value.items() if name != "score" and isinstance(each, int | float)
    }


def _prompt_of(row: Fields) -> Any:  # Any: as the data set has it, text or messages
    return row.get("prompt", row["question"])


def _completion_of(row: Fields, completion: str) -> Any:
    """Return the completion as TRL gives it: messages where the prompt is messages."""
    return [{"role": "assistant", "content": completion}] if isinstance(row.get("prompt"), list) else completion
