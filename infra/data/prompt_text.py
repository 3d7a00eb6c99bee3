"""From rows to the texts of prompts, by the template that the configuration names: the model's, none, or a file of the user's."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from infra.config import DataConfig
from infra.data import chat_templates
from infra.data.chat_renderer import ChatRequest
from infra.data.chat_templates import ChatTemplate
from infra.data.forms.messages import with_instruction
from infra.data.forms.row import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from infra.models.fast_tokenizer import FastTokenizer


def texts_of(
    config: DataConfig, model_folder: Path, tokenizer: "FastTokenizer | PreTrainedTokenizerBase", rows: Sequence[Row]
) -> list[str]:
    """Return the text of each row's prompt.

    Raises:
        ValueError: for a template that cannot be used, or a chat where the template is raw.
    """
    if config.template == "raw":
        return [_raw(row, config) for row in rows]
    template = _template_of(config, model_folder, tokenizer)
    return chat_templates.rendered(template, tokenizer, [_chat_of(row, config) for row in rows])


def _template_of(config: DataConfig, model_folder: Path, tokenizer: "FastTokenizer | PreTrainedTokenizerBase") -> ChatTemplate:
    if path := config.template_file:
        return ChatTemplate(read_template(path), f"template file {path}", config.template_variables)
    return chat_templates.of_model(model_folder, tokenizer)._replace(variables=config.template_variables)


def read_template(path: Path) -> str:
    """Raises ValueError for a file that cannot be read."""
    try:
        return template_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"data.template {str(path)!r} cannot be read ({why}): give chat, raw or a Jinja file") from error


@cache
def template_bytes(path: Path) -> bytes:
    """Return a template's file as this process has read it first, as the rows: the data set's digest, which covers it, is of no other state."""
    return path.read_bytes()


def _raw(row: Row, config: DataConfig) -> str:
    if row.chat is not None:
        raise ValueError(
            f"data.template 'raw' with messages ({row.question[:60]!r}): roles need a template, take 'chat' or a Jinja file"
        )
    return f"{row.question} {config.instruction}" if config.instruction else row.question


def _chat_of(row: Row, config: DataConfig) -> ChatRequest:
    columns = dict(row.columns) if config.template_file else {}
    if row.chat is None:
        content = f"{row.question} {config.instruction}".strip()
        return ChatRequest(messages=[{"role": "user", "content": content}], tools=None, row=columns)
    chat = with_instruction(row.chat, config.instruction)
    return ChatRequest(messages=list(chat.messages), tools=chat.tools, row=columns)
