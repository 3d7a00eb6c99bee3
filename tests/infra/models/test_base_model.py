import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from infra.machine import devices
from infra.models import base_model
from infra.processes import children
from infra.records import BaseModelRef
from infra.store import files
from infra.store.digests import LARGE_BYTES


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those that would have made a model."""
    ran: list[list[str]] = []
    monkeypatch.setattr(children, "run", lambda command, *args, **kwargs: ran.append(command))
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


def test_two_runs_that_begin_at_once_have_one_model_made(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makers = []

    def make(command: list[str], *_: object, **__: object) -> None:
        makers.append(command)
        time.sleep(0.5)  # the other one comes meanwhile
        (workspace / "models/tiny").mkdir(parents=True, exist_ok=True)
        (workspace / "models/tiny/config.json").touch()

    monkeypatch.setattr(children, "run", make)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(base_model.locate, ["tiny", "tiny"])) == [workspace / "models/tiny"] * 2
    assert len(makers) == 1


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
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder), trust_remote_code=False)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", tidies)
    if tidies:
        monkeypatch.setattr(base_model, "tokenizer", lambda folder: tokenizer)
    said = ["Tom has 12 apples .", "caf\u00e9 \U0001f600 ?", ""]
    outputs = [[*tokenizer.encode(text), *base_model.stop_token_ids(model_folder)] for text in said]
    outputs += [tokenizer.encode("\U0001f600")[:-1], []]
    found = base_model.texts_of(model_folder, outputs)
    assert found == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs]
    assert found[:3] == said and "\ufffd" in found[3]


@pytest.mark.parametrize(
    "name",
    [
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "tokenizer.model",
    ],
)
def test_every_file_that_could_be_loaded_is_in_the_digest(workspace: Path, model_folder: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    before = base_model.digest(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    changed = base_model.digest(folder)
    assert changed != before
    (folder / name).write_text('{"eos_token": "x"}')
    assert base_model.digest(folder) not in (before, changed)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "README.md", ".gitattributes", "consolidated.00.pth"])
def test_files_that_nothing_loads_are_not_in_the_digest(workspace: Path, model_folder: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    before = base_model.digest(folder)
    (folder / name).write_text("x")
    assert base_model.digest(folder) == before


def test_a_file_that_was_changed_with_size_and_time_kept_has_another_digest(
    workspace: Path, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(LARGE_BYTES))
    before, times = base_model.digest(folder), weights.stat()
    assert base_model.digest(folder) == before
    with weights.open("r+b") as stream:
        stream.seek(-2000, os.SEEK_END)
        stream.write(b"x" * 2000)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_size == times.st_size
    assert base_model.digest(folder) != before


def test_a_large_file_is_read_again_after_a_day(
    workspace: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "copy", []
    shutil.copytree(model_folder, folder)
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(bytes(LARGE_BYTES))
    inner = base_model.sha256_in
    monkeypatch.setattr(base_model, "sha256_in", lambda stream: read.append(stream.name) or inner(stream))
    for _ in range(2):
        base_model.digest(folder)
    assert len(read) == 1
    (note,) = (workspace / "models/digests").iterdir()
    files.write_json(note, files.read_json(note) | {"read_at": time.time() - base_model.READ_AGAIN_S - 1})
    base_model.digest(folder)
    assert len(read) == 2


@pytest.mark.parametrize("model", ["", "~no-such-user/model"])
def test_a_name_that_can_be_no_folder_is_refused_and_is_not_the_current_folder(model: str) -> None:
    with pytest.raises(ValueError, match=rf"^model '{model}' is no folder; give a Hugging Face folder"):
        base_model.locate(model)


def test_other_libraries_load_a_model_by_its_hub_id_or_its_folder(workspace: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, workspace / "models/tiny")
    assert base_model.public_name("tiny") == str(workspace / "models/tiny")
    assert base_model.public_name(str(model_folder)) == str(model_folder)
    assert base_model.public_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_an_adapter_names_its_base_model_alike_on_every_machine(model_folder: Path) -> None:
    named = [
        base_model.lasting_name(BaseModelRef(id=name, sha256="ab")) for name in (str(model_folder), "tiny", "Qwen/Qwen2.5-0.5B")
    ]
    assert named == ["sha256:ab", "sha256:ab", "Qwen/Qwen2.5-0.5B"]
