from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from infra.tiny_model.architecture import random_model
from infra.tiny_model.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "random-tiny", train_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, 0).save_pretrained(folder)
    return folder
