from pathlib import Path

import pytest

from infra import base_model, devices, processes


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those that would have made a model."""
    ran: list[list[str]] = []
    monkeypatch.setattr(processes, "run", lambda command, *args, **kwargs: ran.append(command))
    return ran


@pytest.mark.usefixtures("workspace")
def test_the_small_model_is_refused_without_a_gpu_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    with pytest.raises(
        ValueError, match="'small' has 83 million parameters and is made on a GPU; there is none here: take 'tiny'"
    ):
        base_model.locate("small")
    assert commands == []


@pytest.mark.parametrize(("kind", "device"), [("tiny", "cpu"), ("tiny-moe", "cpu"), ("small", "cuda")])
def test_a_model_of_ours_is_made_where_it_can_be(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], kind: str, device: str
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 1)
    assert base_model.locate(kind) == workspace / "models" / kind
    (command,) = commands
    assert command[-4:] == ["--kind", kind, "--device", device]


def test_a_small_model_that_is_there_needs_no_gpu(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    (workspace / "models/small").mkdir(parents=True)
    (workspace / "models/small/config.json").touch()
    assert base_model.locate("small") == workspace / "models/small"
    assert commands == []


@pytest.mark.parametrize("tidies", [False, True])
def test_texts_are_those_of_the_tokenizer(model_folder: Path, monkeypatch: pytest.MonkeyPatch, tidies: bool) -> None:
    tokenizer = base_model.tokenizer(model_folder)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", tidies)
    said = ["Tom has 12 apples .", "caf\u00e9 \U0001f600 ?", ""]
    outputs = [[*tokenizer.encode(text), *base_model.stop_token_ids(model_folder)] for text in said]
    outputs += [tokenizer.encode("\U0001f600")[:-1], []]
    found = base_model.texts_of(model_folder, outputs)
    assert found == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs]
    assert found[:3] == said and "\ufffd" in found[3]
