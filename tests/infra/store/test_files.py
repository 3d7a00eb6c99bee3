import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.records import Step
from infra.settings import settings
from infra.store import files
from infra.store.layout import adapter_folder, step_folder


@contextmanager
def no_room_above(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more than this into a file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_breaks_off_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = files.write(tmp_path / "deep/er/file", b"old")
    with no_room_above(1000), pytest.raises(OSError, match="too large"):
        files.write(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_whoever_reads_while_others_write_sees_one_whole_content(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [bytes([65 + n]) * 100_000 for n in range(3)]
    files.write(path, contents[0])
    failures: list[Exception] = []

    def write_often(content: bytes) -> None:
        try:
            for _ in range(10):
                files.write(path, content)
        except OSError as error:
            failures.append(error)

    writers = [threading.Thread(target=write_often, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    assert not failures
    assert list(tmp_path.iterdir()) == [path]


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [{"text": "caf\u00e9 \u2028 \n", "tokens": [1, 2]}, {"text": "", "x": None}]
    assert files.read_json(files.write_json(tmp_path / "one.json", rows[0])) == rows[0]
    assert files.read_json_lines(files.write_json_lines(tmp_path / "all.jsonl", rows)) == rows


def test_a_line_that_is_no_json_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text('{"a": 1}\n{"a": ')
    with pytest.raises(ValueError, match=r"all.jsonl cannot be read: line 2 is no JSON \(Expecting value"):
        files.read_json_lines(tmp_path / "all.jsonl")


def test_nobody_waits_for_a_note_and_whole_it_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "sync", lambda path: pytest.fail(f"waited for {path}"))
    assert files.read_note(files.write_note(tmp_path / "deep/note.json", {"pid": 7}), dict[str, int]) == {"pid": 7}
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "note.json"]


@pytest.mark.parametrize("left", [b"", b'{"pid": ', b"\0" * 12, b"\xff\xfe"])
def test_a_note_of_which_a_power_cut_left_a_part_counts_as_not_written(
    tmp_path: Path, left: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "note.json"
    assert files.read_note(path, dict[str, int]) is None and not caplog.text, "there is none"
    path.write_bytes(left)
    assert files.read_note(path, dict[str, int]) is None and str(path) in caplog.text


def test_a_record_names_its_file_from_the_workspace_on(workspace: Path) -> None:
    path = files.write(workspace / "runs/a/file", b"abc")
    record = files.record_of(path)
    assert (record.path, record.num_bytes) == ("runs/a/file", 3)
    assert record.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.verified(record) == path


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(b"ab"), "has changed since it was written: 2 bytes"),
        (lambda path: path.write_bytes(b"abd"), "has changed since it was written: 3 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "is missing"),
    ],
    ids=["missing", "truncated", "changed", "a folder"],
)
def test_a_damaged_file_is_named(workspace: Path, damage: Callable[[Path], None], words: str) -> None:
    path = files.write(workspace / "runs/a/file", b"abc")
    record = files.record_of(path)
    damage(path)
    with pytest.raises(files.DigestMismatch) as caught:
        files.verified(record)
    assert str(caught.value).startswith(f"{path} {words}")
    assert record.sha256 in str(caught.value)


def test_runs_steps_and_adapters_have_folders_that_sort_by_number(workspace: Path) -> None:
    assert step_folder(Step(run="a", index=12, seed=0)) == workspace / "runs/a/steps/000012"
    assert adapter_folder("a", 3) == workspace / "runs/a/adapters/000003"


def test_a_published_folder_replaces_what_lay_there(tmp_path: Path) -> None:
    staging, target = tmp_path / "staging", tmp_path / "runs/target"
    files.write(target / "half", b"old")
    files.write(staging / "state/deep", b"new")
    files.publish_folder(staging, target)
    assert not staging.exists()
    assert [path.relative_to(target).as_posix() for path in sorted(target.rglob("*"))] == ["state", "state/deep"]
    assert (target / "state/deep").read_bytes() == b"new"


def test_a_fresh_folder_is_empty_whatever_lay_there(tmp_path: Path) -> None:
    files.write(tmp_path / "a/b/left over", b"")
    assert list(files.fresh_folder(tmp_path / "a").iterdir()) == []


def test_a_workspace_can_be_opened_again(workspace: Path) -> None:
    assert files.open_workspace() == files.open_workspace() == workspace


def test_a_workspace_of_another_layout_is_left_alone(workspace: Path) -> None:
    files.write_json(workspace / "workspace.json", {"layout": 99})
    with pytest.raises(ValueError, match=rf"{workspace} has layout 99, .* uses layout 3"):
        files.open_workspace()
    assert files.read_json(workspace / "workspace.json") == {"layout": 99}


def test_a_workspace_with_too_little_room_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_MIN_FREE_GIB", "1e9")
    settings.cache_clear()
    with pytest.raises(ValueError, match=rf"{workspace} has [\d.]+ GiB free, a step needs 1000000000\.0 GiB"):
        files.open_workspace()


def test_the_folder_of_a_user_that_is_not_here_is_not_made_where_a_command_runs() -> None:
    with pytest.raises(ValueError, match="--to '~nobody-here/x': there is no user 'nobody-here' here"):
        files.folder_of_user("--to", "~nobody-here/x")
    assert files.folder_of_user("--to", "~/x") == Path.home() / "x"
