"""The tokenizer without transformers is the one that transformers makes of the same folder, or there is none."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

from infra.models import base_model, fast_tokenizer
from infra.settings import CHECKOUT

TEXTS = [
    "Tom has 12 apples .",
    "",
    "  two\n\n blanks\t caf\u00e9 \U0001f600 \u0130",
    "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "ends with<|im_end|>",
    "<|endoftext|><|im_end|> <|im_star",
]


def copy_of(model_folder: Path, target: Path, **config: Any) -> Path:
    """A folder whose tokenizer_config.json has other fields; None takes one away."""
    folder = shutil.copytree(model_folder, target)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | config
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def assert_like_transformers(folder: Path) -> None:
    fast, auto = fast_tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    assert fast is not None
    for adds in (True, False):
        ids = [auto.encode(text, add_special_tokens=adds) for text in TEXTS]
        assert [fast.encode(text, add_special_tokens=adds) for text in TEXTS] == ids
        assert fast(TEXTS, add_special_tokens=adds)["input_ids"] == ids == auto(TEXTS, add_special_tokens=adds)["input_ids"]
        assert [fast(text, add_special_tokens=adds)["input_ids"] for text in TEXTS] == ids
    for tokens in [*ids, ids[2][:-3]]:
        for skips in (True, False):
            assert fast.decode(tokens, skip_special_tokens=skips) == auto.decode(tokens, skip_special_tokens=skips)
    assert fast.eos_token_id == auto.eos_token_id
    assert fast.special_tokens_map == auto.special_tokens_map
    assert fast.get_chat_template() == auto.get_chat_template()
    assert (fast.is_fast, fast.clean_up_tokenization_spaces) == (auto.is_fast, auto.clean_up_tokenization_spaces)


@pytest.mark.parametrize("tokenizer_class", fast_tokenizer.PLAIN_CLASSES)
@pytest.mark.parametrize("model_type", fast_tokenizer.MODEL_TYPES)
def test_ids_and_texts_are_those_of_transformers(
    model_folder: Path, tmp_path: Path, model_type: str, tokenizer_class: str
) -> None:
    folder = copy_of(model_folder, tmp_path / "model", tokenizer_class=tokenizer_class, bos_token="<|im_start|>")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert_like_transformers(folder)
    assert model_type not in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


def test_special_tokens_that_the_file_itself_adds_are_added(model_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(model_folder, tmp_path / "model")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    number = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", number)])
    backend.save(str(folder / "tokenizer.json"))
    assert_like_transformers(folder)


def with_truncation(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))


OTHERS: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "another class": ({"tokenizer_class": "Qwen2Tokenizer"}, lambda folder: None),
    "no class": ({"tokenizer_class": None}, lambda folder: None),
    "an unknown field": ({"add_bos_token": True}, lambda folder: None),
    "tidy texts": ({"clean_up_tokenization_spaces": True}, lambda folder: None),
    "a special token that is none in the file": ({"bos_token": "<s>"}, lambda folder: None),
    "a further special token": ({"extra_special_tokens": ["<|tool|>"]}, lambda folder: None),
    "two chat templates": ({"chat_template": "{{ messages }}"}, lambda folder: None),
    "no chat template": ({}, lambda folder: (folder / "chat_template.jinja").unlink()),
    "tokens in another file": ({}, lambda folder: (folder / "added_tokens.json").write_text("{}")),
    "truncation": ({}, with_truncation),
    "no tokenizer.json": ({}, lambda folder: (folder / "tokenizer.json").unlink()),
    "an empty tokenizer.json": ({}, lambda folder: (folder / "tokenizer.json").write_text("{}")),
    "odd JSON": ({}, lambda folder: (folder / "tokenizer_config.json").write_text("[]")),
    "qwen2, whose class transformers replaces": (
        {},
        lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2"}'),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_that_only_transformers_knows_is_left_to_it(model_folder: Path, tmp_path: Path, other: str) -> None:
    fields, change = OTHERS[other]
    folder = copy_of(model_folder, tmp_path / "model", **fields)
    change(folder)
    assert fast_tokenizer.load(folder) is None


def test_the_fallback_is_the_tokenizer_of_transformers(model_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(model_folder, tmp_path / "model", tokenizer_class="Qwen2Tokenizer")
    assert isinstance(base_model.tokenizer(folder), Qwen2Tokenizer)


def test_torch_and_transformers_are_not_imported_for_it(model_folder: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from infra.data import prompts
from infra.data.forms.row import Row
from infra.config import DataConfig
from infra.models import base_model
folder = Path({str(model_folder)!r})
prompts.all_tokenized(DataConfig(), folder, [Row("2 + 2?", "")])
base_model.texts_of(folder, [[300, 301]])
base_model.stop_token_ids(folder)
assert not {{"torch", "transformers", "mlflow"}} & sys.modules.keys(), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=True, timeout=120)
