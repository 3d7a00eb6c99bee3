"""Models of each family: the tiny models' tokenizer with the family's special tokens and chat template."""

import json
from pathlib import Path

import pytest
from conversations import HEADERS, TAGS, TEMPLATES, MakeModel
from shared import SMALL_QWEN3
from transformers import PreTrainedTokenizerFast

from infra.tiny_model.tokenizer import CHAT_TEMPLATE, train_tokenizer


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The folder of a model of a family, or of one with another template."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("family")
            tokenizer: PreTrainedTokenizerFast = train_tokenizer()
            template = TEMPLATES.get(family, family)
            if "eot_id" in template:
                tokenizer.add_special_tokens(
                    {"bos_token": HEADERS[0], "eos_token": HEADERS[3], "additional_special_tokens": HEADERS}
                )
            elif template != CHAT_TEMPLATE:
                tokenizer.add_tokens(TAGS)
            tokenizer.chat_template = template
            tokenizer.save_pretrained(made[family])
            (made[family] / "config.json").write_text(json.dumps(SMALL_QWEN3 | {"vocab_size": len(tokenizer)}))
        return made[family]

    return make
