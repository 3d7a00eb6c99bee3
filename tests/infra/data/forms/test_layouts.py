"""Rows as people have them: question and answer, messages, TRL's and verl's files."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.config import DataConfig
from infra.data import dataset

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"}]
CONVERSATION = [*CHAT, {"role": "assistant", "content": "It is 2."}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}


def parquet(path: Path, *rows: dict[str, Any]) -> DataConfig:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return DataConfig(source=str(path))


def jsonl(path: Path, *rows: dict[str, Any]) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(path))


def refusal_of(config: DataConfig) -> str:
    with pytest.raises(ValueError) as caught:
        dataset.rows(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_verl_s_parquet_is_taken_as_it_is(tmp_path: Path) -> None:
    config = parquet(tmp_path / "train.parquet", VERL)
    (row,) = dataset.rows(config)
    assert (row.question, row.answer, row.columns) == ("1 + 1?", "2", VERL)
    assert row.chat and row.chat.messages == VERL["prompt"]
    assert (
        dataset.loaded(config).layout == "verl's layout, prompts from column 'prompt', answers from 'reward_model.ground_truth'"
    )


@pytest.mark.parametrize(("truth", "answer"), [(2, "2"), (["2", "two"], '["2", "two"]'), ({"x": 1}, '{"x": 1}')])
def test_verl_s_ground_truth_may_be_of_any_kind(tmp_path: Path, truth: object, answer: str) -> None:
    row = VERL | {"reward_model": {"style": "rule", "ground_truth": truth}}
    assert dataset.rows(parquet(tmp_path / "train.parquet", row))[0].answer == answer


def test_verl_s_row_without_a_ground_truth_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    assert refusal_of(jsonl(path, VERL | {"reward_model": {"style": "rule"}})) == (
        f"data file {path}, row 0 (from 0): it has no 'reward_model.ground_truth'"
    )


@pytest.mark.parametrize("prompt", ["1 + 1?", [{"role": "user", "content": "1 + 1?"}]])
def test_trl_s_prompts_are_text_or_messages_and_its_columns_stay(tmp_path: Path, prompt: object) -> None:
    config = parquet(tmp_path / "train.parquet", {"prompt": prompt, "solution": "2", "level": 3})
    (row,) = dataset.rows(config)
    assert (row.question, row.answer, row.columns) == ("1 + 1?", "", {"prompt": prompt, "solution": "2", "level": 3})
    assert (row.chat is not None) == isinstance(prompt, list)
    assert dataset.loaded(config).layout == "TRL's layout, prompts from column 'prompt', no answers"
    assert dataset.rows(config.but(answer_column="solution"))[0].answer == "2"


def test_messages_are_recognised_by_the_usual_names_or_named(tmp_path: Path) -> None:
    usual = jsonl(tmp_path / "usual.jsonl", {"messages": CHAT, "answer": 2})
    named = jsonl(tmp_path / "named.jsonl", {"turns": CHAT, "question": "other", "answer": 2}).but(messages_column="turns")
    for config in (usual, named):
        (row,) = dataset.rows(config)
        assert (row.question, row.answer, row.chat and row.chat.messages) == ("1 + 1?", "2", CHAT)
    assert refusal_of(usual.but(messages_column="turns")) == (
        f"data set {usual.source!r} has no column 'turns'; it has messages, answer. data.messages_column names another column"
    )


def test_a_question_column_may_hold_messages(tmp_path: Path) -> None:
    (row,) = dataset.rows(jsonl(tmp_path / "a.jsonl", {"question": CHAT, "answer": "2"}))
    assert row.chat and row.chat.messages == CHAT


def test_fields_that_parquet_adds_to_messages_are_taken_away(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}
    turns = [CHAT[1], call, {"role": "tool", "content": "2", "name": "add"}]
    (row,) = dataset.rows(parquet(tmp_path / "a.parquet", {"messages": turns}))
    assert row.chat and row.chat.messages == turns


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_are_schemas_or_their_json(tmp_path: Path, tools: object) -> None:
    config = jsonl(tmp_path / "a.jsonl", {"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": None})
    assert [row.chat and row.chat.tools for row in dataset.rows(config)] == [[TOOL], None]


def test_a_last_assistant_message_is_continued_or_is_the_answer(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "a.jsonl", {"messages": CONVERSATION})
    (row,) = dataset.rows(config)
    assert row.chat and row.chat.messages == CONVERSATION and row.answer == ""
    assert dataset.loaded(config).layout.endswith("; 1 of 1 rows end with the assistant's text, which the model continues")
    as_answer = config.but(assistant_turn="answer")
    (row,) = dataset.rows(as_answer)
    assert (row.chat and row.chat.messages, row.answer) == (CHAT, "It is 2.")
    assert dataset.loaded(as_answer).layout.endswith(", answers from the last message of the assistant")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the messages (column 'messages') are []: give a list with one message or more"),
        (
            [{"from": "human", "value": "?"}],
            'message 0 (column \'messages\') is {"from": "human", "value": "?"}: give an object with role and',
        ),
        ([{"role": "user"}], "message 0 (column 'messages') has no content"),
        (
            [CHAT[1], {"role": "assistant", "content": ""}],
            "the last message (column 'messages') is the assistant's and has no text",
        ),
        ([{"role": "user", "content": 3}], "message 0 (column 'messages') has content 3: give text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
            "message 0 (column 'messages') holds a part of type 'image_url'; models are trained on text here",
        ),
    ],
)
def test_messages_that_cannot_be_asked_are_refused_with_their_place(tmp_path: Path, messages: object, message: str) -> None:
    path = tmp_path / "a.jsonl"
    assert refusal_of(jsonl(path, {"messages": CHAT}, {"messages": messages})).startswith(
        f"data file {path}, row 1 (from 0): {message}"
    )


def test_text_parts_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    (row,) = dataset.rows(jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": parts}]}))
    assert row.question == "1 + 1?"


def test_a_column_of_images_is_refused_and_one_of_names_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    refused = parquet(path, {"question": "What is this?", "answer": "a", "image": {"bytes": b"PNG", "path": None}})
    assert refusal_of(refused).startswith(f"data file {path}, row 0 (from 0): column 'image' holds images; models are trained on")
    named = jsonl(tmp_path / "b.jsonl", {"question": "?", "answer": "a", "image": "a.png"})
    assert len(dataset.rows(named)) == 1


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"question": ""}, "question"),
        ({"question": " \n"}, "question"),
        ({"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": " "}]}, "messages"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_an_empty_question_is_refused_with_its_row(tmp_path: Path, row: dict[str, Any], column: str) -> None:
    (name,) = row
    first = {name: CHAT if name == "messages" else "1 + 1?"}
    config = jsonl(path := tmp_path / "train.jsonl", first, row)
    assert refusal_of(config) == (
        f"data file {path}, row 1 (from 0): its question (column {column!r}) is empty: give it a text, or take the row out of the data set"
    )
    (template := tmp_path / "of_other_columns.jinja").write_text("{{ row }}")
    assert len(dataset.rows(config.but(template=str(template)))) == 2


def test_empty_questions_can_be_filtered(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "train.jsonl", {"question": "1 + 1?"}, {"question": ""})
    assert len(dataset.rows(config.but(filter=('question != ""',)))) == 1


def test_rows_are_compared_by_what_is_said_and_not_by_the_system_prompt(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Go on."}]
    others = [turns[0] | {"content": "3?"}, *turns[1:]]
    config = jsonl(tmp_path / "a.jsonl", *({"messages": each} for each in (turns, [CHAT[0], *turns], others)))
    assert len(dataset.question_digests(config)) == 2
    assert {row.question for row in dataset.rows(config)} == {"Go on."}


def test_a_template_file_needs_no_question(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "a.jsonl", {"a": 1, "b": 2}).but(template=str(tmp_path / "sum.jinja"))
    assert dataset.rows(config)[0].columns == {"a": 1, "b": 2}
    assert refusal_of(config.but(template="chat")).startswith(
        f"data set {config.source!r} has no column 'question'; it has a, b."
    )
