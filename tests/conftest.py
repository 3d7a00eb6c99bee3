"""What all tests share: a workspace of their own, and a model folder that costs nothing to make."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any Hugging Face library is imported: a test that would reach for the hub fails at once instead.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lanes import is_slow, spread
from shared import FIRST_PORT, SMALL_QWEN3, prefect_harness, write_zero_weights

from infra.settings import settings

os.environ["RATCHET_ENGINE_PORT"] = str(FIRST_PORT + 1800)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow files, and put files into the order in which workers take them."""
    for item in items:
        if is_slow(item.path.relative_to(Path(__file__).parent).as_posix()):
            item.add_marker("slow")
    end_to_end, slow = ({item.path: None for item in items if item.get_closest_marker(mark)} for mark in ("end_to_end", "slow"))
    order = {
        path: place for place, path in enumerate(spread(list(end_to_end), [path for path in slow if path not in end_to_end]))
    }
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session", autouse=True)
def _datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """The root logger is after each test as it was before: a handler left behind would write to a closed stream during another test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty workspace; settings are read again, so a test that changes others clears their cache itself."""
    monkeypatch.setenv("RATCHET_WORKSPACE", str(tmp_path))
    settings.cache_clear()
    yield tmp_path
    settings.cache_clear()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with the tokenizer of the tiny models, and zeros in the place of weights."""
    from infra.tiny_model.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    train_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN3))
    write_zero_weights(folder)
    return folder


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """One server for all flows of a worker: each costs 6 CPU s to start, and works on its own as long as it lives."""
    with prefect_harness():
        yield


@pytest.fixture(scope="session")
def random_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a tokenizer."""
    from infra.tiny_model.architecture import random_model
    from infra.tiny_model.tokenizer import train_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models") / "random-tiny", train_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The model `tiny`, made in the checkout's own workspace, where later test runs find it. Its answers have 4 to 48 tokens."""
    from infra.models import base_model

    settings.cache_clear()
    return base_model.locate("tiny")


@pytest.fixture
def ends_real_programs(workspace: Path) -> Iterator[None]:
    """The workers, the engine and the trainer that a test has started end with it."""
    from infra.engines.server import server_process
    from infra.rewards import client
    from infra.trainers import resident

    yield
    client.close_all()
    server_process.stop_recorded()
    resident.stop_recorded()
