"""Recognise the layout of a data set by its columns, and read rows of it.

question, answer                                     text, or a list of messages in place of the question
messages                                             data.messages_column, or a column of a usual name
prompt, any others                                   TRL
data_source, prompt, reward_model, extra_info, ...   verl: the answer is reward_model.ground_truth
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from infra.config import DataConfig
from infra.data.forms import messages
from infra.data.forms.row import Row
from infra.data.json_values import JSON, as_json

CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat")
"""Usual names of columns with lists of chat messages."""
VERL_COLUMNS = {"data_source", "prompt", "reward_model"}


class Layout(NamedTuple):
    name: str
    prompt_column: str | None
    """None: the template is a file, and takes what it needs from the row."""
    answer_path: tuple[str, ...]
    """Column of the answers, and the place in its values; empty: the rows have none."""

    def line(self, assistant_turn: str) -> str:
        """Say what was recognised."""
        prompt = f"column {self.prompt_column!r}" if self.prompt_column else "the template file"
        last = "answers from the last message of the assistant" if assistant_turn == "answer" else "no answers"
        answer = f"answers from {'.'.join(self.answer_path)!r}" if self.answer_path else last
        return f"{self.name}, prompts from {prompt}, {answer}"


def layout_of(config: DataConfig, names: Sequence[str]) -> Layout:
    """Recognise a data set by its columns. Columns that the configuration names come first.

    Raises:
        ValueError: for a column that is missing; says what there is and what to do.
    """
    if config.messages_column is not None:
        _check_there(config, config.messages_column, "messages_column", names)
        return Layout("messages", config.messages_column, _answer_path(config, names))
    if config.question_column in names:
        return Layout("question and answer", config.question_column, _answer_path(config, names))
    if _is_default(config, "question_column"):
        if set(names) >= VERL_COLUMNS:
            answer = _answer_path(config, names) or ("reward_model", "ground_truth")
            return Layout("verl's layout", "prompt", answer)
        if "prompt" in names:
            return Layout("TRL's layout", "prompt", _answer_path(config, names))
        if chats := [name for name in names if name in CHAT_COLUMNS]:
            return Layout("messages", chats[0], _answer_path(config, names))
        if config.template_file:
            return Layout("rows", None, _answer_path(config, names))
    _check_there(config, config.question_column, "question_column", names)
    raise AssertionError("unreachable")


def _is_default(config: DataConfig, field: str) -> bool:
    return bool(getattr(config, field) == DataConfig.model_fields[field].default)


def _check_there(config: DataConfig, column: str, field: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ValueError(
            f"data set {config.source!r} has no column {column!r}; it has {', '.join(names)}. data.{field} names another column"
        )


def _answer_path(config: DataConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Only an answer column that the configuration names has to be there: a reward may take what it needs from the whole row."""
    if not _is_default(config, "answer_column"):
        _check_there(config, config.answer_column, "answer_column", names)
    return (config.answer_column,) if config.answer_column in names else ()


def row_of(values: dict[str, object], layout: Layout, config: DataConfig) -> Row:
    """Read a row.

    Raises:
        ValueError: for a value that is missing, or is no prompt or no answer, and for an empty question.
    """
    columns = {name: _column(value, name) for name, value in values.items()}
    messages.check_no_images(columns)
    answer = _answer(values, layout)
    if layout.prompt_column is None:
        return Row(json.dumps(columns, ensure_ascii=False), answer, columns)
    row = _row(columns, answer, layout.prompt_column, config)
    if not row.question.strip() and not config.template_file:  # which may make the prompt of other columns
        raise ValueError(
            f"its question (column {layout.prompt_column!r}) is empty: give it a text, or take the row out of the data set"
        )
    return row


def _row(columns: dict[str, JSON], answer: str, prompt_column: str, config: DataConfig) -> Row:
    value = columns.get(prompt_column)
    if not isinstance(value, list):
        return Row(_question_text(value, prompt_column), answer, columns)
    chat = messages.chat_of(value, prompt_column, columns.get(config.tools_column))
    if chat.is_continued and config.assistant_turn == "answer":
        chat, last = messages.without_last_turn(chat)
        answer = answer or last
    return Row(chat.question, answer, columns, chat)


def _column(value: object, name: str) -> JSON:
    try:
        found = as_json(value)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise ValueError(f"column {name!r} has {half!r}, half of a surrogate pair, which is no character: take it out") from error
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error
    return found


def _question_text(value: JSON, column: str) -> str:
    if value is None:
        raise ValueError(f"it has no {column!r}")
    if not isinstance(value, str):
        raise ValueError(f"the question (column {column!r}) is {_kind(value)}, neither text nor a list of chat messages")
    return value


def _answer(values: Mapping[str, object], layout: Layout) -> str:
    """The answer's canonical text: text as it stands; an integer, a float or a bool as JSON writes it (42, 0.5, true). What verl compares with
    may be a list or an object: also as JSON."""
    if not layout.answer_path:
        return ""
    value: object = values
    for name in layout.answer_path:
        value = value.get(name) if isinstance(value, Mapping) else None
    column = ".".join(layout.answer_path)
    match value:
        case None:
            raise ValueError(f"it has no {column!r}")
        case str():
            return value
        case int() | float() if math.isfinite(value):
            return json.dumps(value)
        case list() | dict() if len(layout.answer_path) > 1:
            return json.dumps(as_json(value))
    kind = f"the float {value}" if isinstance(value, float) else _kind(value)
    raise ValueError(f"the answer (column {column!r}) is {kind}: it must be text, a finite number, or true or false")


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
