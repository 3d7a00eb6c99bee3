"""A model's tokenizer by the library `tokenizers` alone, for folders where that is exactly what transformers would make of their files.

transformers' AutoTokenizer imports torch and takes 7 s of CPU time in each process; the library below it takes 0.02 s. `load` gives None for a
folder with anything that it does not know: then AutoTokenizer has to be asked.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that take tokenizer.json as it is; others, such as Qwen2Tokenizer, make their own of its vocabulary."""
MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")
"""Types in config.json for which transformers trusts the class in tokenizer_config.json."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
WITHOUT_EFFECT = ("backend", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class")
"""Fields of tokenizer_config.json that are checked below, or change neither ids nor texts."""
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates", "chat_template.json")
"""Files that transformers would read too."""
MAX_VOCABULARY = 100_000
"""From this size on transformers looks at the expression that splits words, and may replace it."""


class FastTokenizer:
    """The part of transformers' interface that is used here."""

    is_fast = True
    clean_up_tokenization_spaces = False

    def __init__(self, backend: "Tokenizer", special_tokens: dict[str, Any], chat_template: str) -> None:
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, special_tokens, chat_template
        eos_token = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)

    def __call__(self, texts: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids`: the ids of a text, or of each of several."""
        if isinstance(texts, str):
            return {"input_ids": self.encode(texts, add_special_tokens=add_special_tokens)}
        encoded = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in encoded]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def get_chat_template(self) -> str:
        return self.chat_template


def load(folder: Path) -> FastTokenizer | None:
    """The tokenizer of a model's folder; None where only transformers knows what its files mean."""
    try:
        config, model = (json.loads((folder / name).read_bytes()) for name in ("tokenizer_config.json", "config.json"))
        template = _template_of(folder, config)
        if template is None or not _is_plain(folder, config, model):
            return None
        return _with_backend(folder / "tokenizer.json", config, template)
    except (
        OSError,
        ValueError,
        AttributeError,
        KeyError,
        TypeError,
    ):  # a file is missing, or holds something else: AutoTokenizer names it
        return None


def _is_plain(folder: Path, config: dict[str, Any], model: dict[str, Any]) -> bool:
    known = {*NAMED, *WITHOUT_EFFECT, "extra_special_tokens", "chat_template"}
    return (
        config.get("tokenizer_class") in PLAIN_CLASSES
        and config.get("backend", "tokenizers") == "tokenizers"
        and config.get("clean_up_tokenization_spaces") is False
        and model.get("model_type") in MODEL_TYPES
        and config.keys() <= known
        and not any((folder / name).exists() for name in OTHER_FILES)
    )


def _template_of(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template, where it stands in one place."""
    path, inside = folder / "chat_template.jinja", config.get("chat_template")
    if not path.exists():
        return inside if isinstance(inside, str) else None
    return path.read_text(encoding="utf-8") if inside is None else None


def _with_backend(path: Path, config: dict[str, Any], template: str) -> FastTokenizer | None:
    from tokenizers import Tokenizer

    content = json.loads(path.read_bytes())
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    named = {name: config[name] for name in NAMED if config.get(name) is not None}
    extra = config.get("extra_special_tokens", [])
    if not isinstance(extra, list) or not {*map(str, named.values()), *map(str, extra)} <= special:
        return None
    backend = Tokenizer.from_file(str(path))
    if backend.truncation or backend.padding or backend.get_vocab_size() > MAX_VOCABULARY:
        return None
    return FastTokenizer(backend, named, template)
