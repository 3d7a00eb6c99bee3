"""A reward model's folder: where it is, whether it can score, and which digest it has. Without torch."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from infra.config import RewardModelConfig
from infra.data import chat_templates
from infra.models import base_model
from infra.store.files import read_json

HEAD = "ForSequenceClassification"


def folder_of(config: RewardModelConfig) -> Path:
    """Return the model's folder; a hub model is downloaded where it is missing. Raises ValueError as `base_model.locate` does."""
    return _located(config.path, config.revision or None)


@cache
def _located(path: str, revision: str | None) -> Path:
    if Path(os.path.expanduser(path)).is_dir() and revision:
        raise ValueError(
            f"reward.model.revision {revision!r} with the folder {path!r}: only a hub id has revisions, leave it out"
        )
    try:
        return base_model.locate(path, revision)
    except ValueError as error:
        raise ValueError(f"reward.model.path: {error}") from error


def digest(config: RewardModelConfig) -> str:
    """Digest the files of the model: they decide what samples get."""
    return base_model.digest(folder_of(config))


def check(config: RewardModelConfig) -> None:
    """Raises ValueError, in one line, for a folder that holds no model that can score conversations."""
    folder = folder_of(config)
    described = folder / "config.json"
    if not described.is_file():
        raise ValueError(f"reward.model.path {config.path!r}: {folder} has no config.json, so it holds no model")
    content: dict[str, Any] = read_json(described)  # JSON
    named = content.get("architectures") or []
    if not any(str(each).endswith(HEAD) for each in named):
        raise ValueError(
            f"reward.model.path {config.path!r} holds {', '.join(map(str, named)) or 'no architecture'}: a reward model is one whose "
            f"architecture ends in {HEAD}"
        )
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"reward.model.path {config.path!r}: {folder} has no *.safetensors")
    positions = base_model.num_positions(folder)
    if config.max_tokens > positions:
        raise ValueError(f"reward.model.max_tokens {config.max_tokens} is more than the {positions} positions of {config.path!r}")
    chat_templates.of_model(folder, base_model.tokenizer(folder))
