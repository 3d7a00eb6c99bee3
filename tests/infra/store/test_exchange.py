"""A note takes the place of another one: by an exchange of names where the system can, without a moment in which there is none."""

import os
import threading
from pathlib import Path

import pytest

from infra.store import exchange, files


def test_a_note_replaces_another_one_by_an_exchange_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write_note(tmp_path / "note.json", 1)
    monkeypatch.setattr(Path, "replace", lambda self, target: pytest.fail("the disk is waited for"))
    files.write_note(path, 2)
    assert files.read_json(path) == 2
    partial = tmp_path / "partial"
    partial.write_text("3")
    exchange.replace(partial, path)
    assert files.read_json(path) == 3
    assert os.listdir(tmp_path) == ["note.json"]


@pytest.mark.parametrize("missing", ["function", "file system"])
def test_where_names_cannot_be_exchanged_the_note_replaces_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(exchange, "_libc", lambda: None) if missing == "function" else monkeypatch.setattr(
        exchange, "_EXCHANGE", 1 << 10
    )
    for value in (1, 2):
        assert files.read_json(files.write_note(tmp_path / "note.json", value)) == value
    assert os.listdir(tmp_path) == ["note.json"]


def test_a_link_is_replaced_and_a_folder_is_not(tmp_path: Path) -> None:
    elsewhere = files.write_note(tmp_path / "elsewhere.json", "kept")
    link = tmp_path / "link.json"
    link.symlink_to(elsewhere)
    files.write_note(link, "new")
    assert not link.is_symlink()
    assert [files.read_json(each) for each in (elsewhere, link)] == ["kept", "new"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"Is a directory.*folder"):
        files.write_note(tmp_path / "folder", "new")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere.json", "folder", "link.json"]


def test_a_reader_finds_the_old_or_the_new_note(tmp_path: Path) -> None:
    path, ends = files.write_note(tmp_path / "note.json", 0), threading.Event()
    found: list[int] = []
    missed: list[OSError] = []

    def read() -> None:
        while not ends.is_set():
            try:
                found.append(files.read_json(path))
            except OSError as error:
                missed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for value in range(1, 400):
            files.write_note(path, value)
    finally:
        ends.set()
        reader.join()
    assert not missed
    assert found == sorted(found)
    assert len(set(found)) > 1


def test_what_is_synced_replaces_the_other_one_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "replace", lambda *paths: pytest.fail("its content may not be on the disk"))
    assert files.read_json(files.write_json(tmp_path / "record.json", 1)) == 1
