"""A chat template is code from the model's folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from shared import becomes, is_gone
from transformers import AutoTokenizer

from infra.config import DataConfig, EngineConfig, RunConfig
from infra.data import chat_templates, prompts
from infra.data.chat_renderer import ChatRequest
from infra.data.forms.row import Row
from infra.models import base_model
from tasks.support.preflight import check

PLAIN = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
LOOP = "{% for a in range(99999) %}"
ENDLESS = {
    "nested loops": f"{LOOP * 4}{'{% endfor %}' * 4}",
    "nested loops for some questions only": "{% for a in messages[0].content %}" * 7 + "{% endfor %}" * 7,
    "one operation without end": "{{ 7 ** (99999 ** 2) }}",
}
SHAPES = (
    PLAIN + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=1) }}{{ eos_token }}",
    "{%- set ns = namespace(n=0) -%}\n  {%- for m in messages -%}{% if loop.first %}{% set ns.n = 1 %}{% endif %}{% break %}{%- endfor %}{{ ns.n }}",
    "{% generation %}{{ messages[0]['content'] | trim }}{% endgeneration %}\n{% if tools is none and documents is none %}none{% endif %}",
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{% if date is not defined %}{% set date = '1' %}{% endif %}{{ date }}",
)
TEXTS = ["2 + 2?", "", ' <b>\'"caf\u00e9" \u2028 {{ 1 }} {% raw %}\n', "x" * 5000]


def rows_of(questions: list[str]) -> list[Row]:
    return [Row(question, "") for question in questions]


def with_template(model_folder: Path, target: Path, template: str) -> Path:
    folder = shutil.copytree(model_folder, target)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def refusal_of(folder: Path, questions: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        prompts.all_tokenized(DataConfig(), folder, rows_of(questions))
    message = str(caught.value)
    assert message.startswith(f"the chat template of model folder {folder} cannot be used for ") and "\n" not in message
    return message


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_a_chat_is_rendered_and_tokenized_as_transformers_does_it(model_folder: Path, tmp_path: Path, number: int) -> None:
    folder = with_template(model_folder, tmp_path / "model", SHAPES[number])
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    requests = [ChatRequest(messages=[dict(message) for message in chat], tools=None, row={}) for chat in chats]
    template = chat_templates.of_model(folder, base_model.tokenizer(folder))
    assert chat_templates.rendered(template, base_model.tokenizer(folder), requests) == tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=False
    )
    expected = tokenizer.apply_chat_template(
        [[{"role": "user", "content": text.strip()}] for text in TEXTS],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert prompts.all_tokenized(DataConfig(), folder, rows_of(TEXTS)) == expected


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_refused_and_its_program_ended(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(chat_templates, "CPU_LIMIT_S", 1)
    folder = with_template(model_folder, tmp_path / "model", ENDLESS[kind])
    message = refusal_of(folder, ["How many apples are there if each of twelve boxes holds twelve of them?"])
    assert message.endswith("cannot be used for a question: it takes more than 1 s of CPU time")
    others = with_template(model_folder, tmp_path / "good", PLAIN)
    assert len(prompts.all_tokenized(DataConfig(), others, rows_of(["2 + 2?"]))) == 1, "the next template finds a new program"


def test_a_program_that_does_not_answer_is_ended_at_the_deadline(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "DEADLINE_S", 0.5)
    folder = with_template(model_folder, tmp_path / "model", ENDLESS["nested loops"])
    assert refusal_of(folder, ["?"]).endswith("it takes more than 0.5 s")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for a in range(9999) %}{{ messages[0].content }} and so on {% endfor %}",
            r"it makes \d{6} characters of a question of 6",
        ),
        ("{{ messages[0].content * 99999999 }}", "characters of a question of 6|more than 2 GiB of memory"),
        ("{% set x = messages[0].content * 9999999999 %}", "it takes more than 2 GiB of memory"),
        ("{{ raise_exception('no system\nprompt') }}", "TemplateError: no system prompt"),
        ("{% for %}", "TemplateSyntaxError: "),
    ],
)
def test_a_template_that_fails_or_makes_too_much_is_refused(model_folder: Path, tmp_path: Path, template: str, why: str) -> None:
    message = refusal_of(with_template(model_folder, tmp_path / "model", template), ["2 + 2?"])
    assert re.search(why, message), message


def test_a_run_with_such_a_template_is_refused_before_anything_starts(
    workspace: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "CPU_LIMIT_S", 1)
    folder = with_template(model_folder, tmp_path / "model", ENDLESS["nested loops"])
    with pytest.raises(ValueError, match="it takes more than 1 s of CPU time"):
        check(RunConfig(name="mine", model=str(folder), engine=EngineConfig(kind="scripted")))
    assert not (workspace / "runs").exists()


ASKS = """
from infra.data.chat_templates import Renderer
limits = {"special_tokens": {}, "variables": {}, "cpu_limit_s": 2, "max_growth": 1, "max_extra": 0}
chat = {"messages": [{"role": "user", "content": "a"}], "tools": None, "row": {}}
Renderer().ask({"template": %r, "chats": [chat], **limits})
"""


@pytest.mark.parametrize("template", [ENDLESS["nested loops"], "{{ messages[0].content }}"])
def test_the_program_gets_no_secrets_and_ends_with_the_one_that_asks(template: str) -> None:
    """Killed in the middle of an endless template, or while nothing is rendered."""
    sleep = "import time\ntime.sleep(600)"
    asking = subprocess.Popen([sys.executable, "-c", ASKS % template + sleep], env=os.environ | {"OPENAI_API_KEY": "secret"})
    try:
        parent = psutil.Process(asking.pid)
        assert becomes(lambda: any("infra.data.chat_renderer" in child.cmdline() for child in parent.children()), within_s=60)
        (child,) = parent.children()
        assert "PATH" in child.environ()
        assert "OPENAI_API_KEY" not in child.environ()
    finally:
        asking.kill()
        asking.wait()
    assert becomes(lambda: is_gone(child.pid), within_s=60)
