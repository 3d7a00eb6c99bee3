import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.store import digests
from infra.store.digests import Digest

CONTENT = b"x" * digests.LARGE_BYTES


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were read for their digest, by their names; and none is too young to be remembered."""
    made: list[str] = []
    read = digests.sha256_in

    def noted(file):  # type: ignore[no-untyped-def]
        made.append(Path(file.name).name)
        return read(file)

    monkeypatch.setattr(digests, "sha256_in", noted)
    monkeypatch.setattr(digests, "SETTLED_S", -1.0)
    monkeypatch.setattr(digests, "_remembered", {})
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(CONTENT)
    return tmp_path / "folder/file"


def right(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_large_file_is_read_once_also_under_another_name(path: Path, reads: list[str]) -> None:
    assert digests.sha256_of(path) == digests.sha256_of(path) == right(path)
    moved = path.parent.rename(path.parent.with_name("other")) / "file"
    assert digests.sha256_of(moved) == right(moved)
    assert reads == ["file"]


def test_a_file_that_was_written_to_is_read_again_whatever_its_time_of_modification_says(path: Path, reads: list[str]) -> None:
    before, old = digests.sha256_of(path), path.stat()
    with path.open("r+b") as stream:
        stream.write(b"y")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert before != digests.sha256_of(path) == right(path)
    assert reads == ["file", "file"]


def test_another_file_in_its_place_is_read(path: Path, reads: list[str]) -> None:
    digests.sha256_of(path)
    other = path.with_name("other")
    other.write_bytes(b"y" * len(CONTENT))
    other.replace(path)
    assert digests.sha256_of(path) == right(path)


def test_a_small_file_and_one_that_was_just_written_are_read_each_time(
    path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = path.with_name("small")
    small.write_bytes(CONTENT[1:])
    monkeypatch.setattr(digests, "SETTLED_S", 3600.0)
    for each in (small, small, path, path):
        assert digests.sha256_of(each) == right(each)
    assert reads == ["small", "small", "file", "file"]


def test_the_digest_of_another_program_counts_until_the_file_is_written_to(path: Path, reads: list[str]) -> None:
    said = Digest(sha256="said", stamp=digests.stamp_of(path))
    digests.trust_digest(path, said)
    assert digests.sha256_of(path) == "said"
    path.write_bytes(b"y" * len(CONTENT))
    digests.trust_digest(path, said)
    assert digests.sha256_of(path) == right(path)
    path.unlink()
    digests.trust_digest(path, said)


def test_no_more_is_remembered_than_there_is_room_for(tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_REMEMBERED", 2)
    for name in "abcab":
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(CONTENT)
        digests.sha256_of(tmp_path / name)
    assert reads == ["a", "b", "c", "a", "b"]


def test_threads_that_remember_at_once_do_not_fall_over_one_another(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAX_REMEMBERED", 2)
    known = {}
    for path in map(tmp_path.joinpath, "abcd"):
        path.write_bytes(CONTENT)
        known[path] = Digest(sha256=f"of {path.name}", stamp=digests.stamp_of(path))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: [digests.trust_digest(*each) for each in known.items()], range(4000)))
    finally:
        sys.setswitchinterval(usual)
    assert 1 <= len(digests._remembered) <= 2
