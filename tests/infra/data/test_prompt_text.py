"""The texts of prompts, against transformers' own rendering."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from infra.config import DataConfig
from infra.data import dataset, prompts
from infra.data.forms.row import Chat, Row
from infra.data.prompt_text import template_bytes
from infra.models import base_model

CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And one more?"},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    made = shutil.copytree(model_folder, tmp_path / "model")
    (made / "chat_template.jinja").write_text(CHATML)
    return made


def text_of(config: DataConfig, folder: Path, row: Row) -> str:
    (tokens,) = prompts.all_tokenized(config, folder, [row])
    return str(base_model.tokenizer(folder).decode(tokens))


@pytest.mark.parametrize(
    ("last", "tools", "thinking"),
    [
        (None, None, None),
        (None, TOOLS, None),
        (None, None, False),
        ("The sum", None, None),
        ("The sum is ", None, None),
        ("\n It", TOOLS, True),
    ],
)
def test_chats_are_rendered_as_transformers_does_it(
    folder: Path, last: str | None, tools: list[Any] | None, thinking: bool | None
) -> None:
    turns = [*TURNS, *([{"role": "assistant", "content": last}] if last else [])]
    variables = {} if thinking is None else {"enable_thinking": thinking}
    config = DataConfig(chat_template_kwargs=tuple(f"{name}={json.dumps(value)}" for name, value in variables.items()))
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    expected = tokenizer.apply_chat_template(
        turns, tools=tools, add_generation_prompt=not last, continue_final_message=bool(last), return_dict=False, **variables
    )
    assert prompts.all_tokenized(config, folder, [Row("", "", {}, Chat(turns, tools))]) == [expected]


def test_a_prefix_that_the_template_leaves_out_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    turns = [*TURNS, {"role": "assistant", "content": "The sum"}]
    with pytest.raises(ValueError, match="the assistant's last message, which the model would continue, does not appear"):
        prompts.all_tokenized(DataConfig(), folder, [Row("", "", {}, Chat(turns))])


def test_the_instruction_follows_the_last_message_of_the_user(folder: Path) -> None:
    config = DataConfig(instruction="Think.")
    turns = [*TURNS, {"role": "assistant", "content": "Well"}]
    text = text_of(config, folder, Row("", "", {}, Chat(turns)))
    assert text.endswith("<|im_start|>user\nAnd one more? Think.<|im_end|>\n<|im_start|>assistant\nWell")
    assert "1 + 1?<|im_end|>" in text


def test_raw_text_stays_as_it_is(folder: Path) -> None:
    raw = DataConfig(template="raw")
    assert text_of(raw, folder, Row("  def f(x):\n", "")) == "  def f(x):\n"
    assert text_of(raw.but(instruction="# now"), folder, Row("x", "")) == "x # now"
    with pytest.raises(ValueError, match=r"data\.template 'raw' with messages \('And one more\?'\): roles need a template"):
        prompts.all_tokenized(raw, folder, [Row("And one more?", "", {}, Chat(TURNS))])


def test_a_file_is_the_template_and_gets_the_row(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "sum.jinja"
    path.write_text("{{ row.a }} + {{ row.b }} ={% if shout %}!{% endif %}")
    data = tmp_path / "a.jsonl"
    data.write_text('{"a": 1, "b": 2}\n')
    config = DataConfig(source=str(data), template=str(path), chat_template_kwargs=("shout=true",), num_prompts=1)
    (prompt,) = prompts.draw(config, folder, step=0, seed=0)
    assert base_model.tokenizer(folder).decode(prompt.prompt_tokens) == "1 + 2 =!"
    assert prompt.row == {"a": 1, "b": 2}


def test_a_changed_template_file_is_other_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    found = []
    for text in ("{{ row.a }}", "{{ row.a }}", "{{ row.a }}?"):
        path.write_text(text)
        for cache in (dataset.fingerprint, template_bytes):
            cache.cache_clear()  # as another process sees it
        found.append(dataset.fingerprint(DataConfig(template=str(path))))
    assert found[0] == found[1] != found[2]


def test_a_template_file_that_changes_while_a_process_runs_leaves_its_prompts_as_their_digest_says(
    folder: Path, tmp_path: Path
) -> None:
    path, row = tmp_path / "a.jinja", Row("2 + 2?", "4", {"a": 1})
    path.write_bytes(b"{{ row.a }}\r\n=")
    config = DataConfig(template=str(path))
    before = (dataset.fingerprint(config), text_of(config, folder, row))
    path.write_text("{{ row.a }}?")
    assert (dataset.fingerprint(config), text_of(config, folder, row)) == before
    template_bytes.cache_clear()
    dataset.fingerprint.cache_clear()
    after = (dataset.fingerprint(config), text_of(config, folder, row))
    assert after[0] != before[0] and (before[1], after[1]) == ("1\n=", "1?")


def test_a_template_file_that_is_not_there_is_named_before_the_run(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data\.template 'chatt' cannot be read \(No such file or directory\): give chat, raw or"
    ):
        prompts.check_lengths(DataConfig(template="chatt"), folder)


def test_one_chat_that_is_too_long_is_found_before_it_is_drawn(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = [TURNS[0] | {"content": "Be short. " * 40}, TURNS[1]]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in (TURNS, long)))
    with pytest.raises(ValueError, match=r"1 of 2 prompts of .* that of row 1 has "):
        prompts.check_lengths(DataConfig(source=str(path), max_prompt_tokens=128), folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template_kwargs": ("enable_thinking",)}, "chat_template_kwargs 'enable_thinking' is no NAME=VALUE"),
        ({"chat_template_kwargs": ("a b=1",)}, "chat_template_kwargs 'a b=1' is no NAME=VALUE"),
        ({"chat_template_kwargs": ("a=1",), "template": "raw"}, "'a=1' with template 'raw': no template gets it"),
    ],
)
def test_variables_without_a_use_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)
