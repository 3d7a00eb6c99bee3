"""The journal of a rollout: what is found in it again after a crash, and what is not taken for its own."""

import hashlib
import json
import resource
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from infra.engines.journal import Journal
from infra.failures import classify
from infra.store.samples import Sample

FENCE = {"adapter": "a1", "prompts": "p1", "sampling": "s1"}


def sample(prompt_id: int, index: int) -> Sample:
    return Sample(
        prompt_id=prompt_id,
        sample_index=index,
        prompt_tokens=[1, 2],
        output_tokens=[3 + index],
        output_logprobs=[-0.1 / 3],
        finish_reason="stop",
        adapter_version=1,
        adapter_sha256="a1",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a journal with three samples."""
    path = tmp_path / "samples.journal"
    with Journal(path, FENCE) as journal:
        for index in range(3):
            journal.add(sample(7, index))
    return path


def kept(path: Path, fence: dict[str, str] = FENCE) -> list[Sample]:
    with Journal(path, fence) as journal:
        return list(journal.samples.values())


def test_samples_come_back_to_the_bit(path: Path) -> None:
    assert kept(path) == [sample(7, index) for index in range(3)]


def test_a_line_is_in_the_file_before_the_journal_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.journal", FENCE).__enter__()
    journal.add(sample(7, 0))
    assert len((tmp_path / "samples.journal").read_bytes().splitlines()) == 2


def test_its_name_reaches_the_disk_with_the_first_sample_and_what_earlier_attempts_left_at_once(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    for module in ("infra.store.files", "infra.store.journal"):
        monkeypatch.setattr(f"{module}.sync", synced.append)
    with Journal(tmp_path / "new/samples.journal", FENCE) as journal:
        assert synced == []
        journal.add(sample(7, 0))
        assert synced == [tmp_path / "new"]
        journal.add(sample(7, 1))
        assert synced == [tmp_path / "new"]
    synced.clear()
    with Journal(path, FENCE):
        assert tmp_path in synced and len(synced) == 2, "the content and the name"


@pytest.mark.parametrize("num_bytes_lost", [1, 30, 200])
def test_a_last_line_that_was_cut_off_is_dropped_and_does_not_spoil_the_next(path: Path, num_bytes_lost: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes_lost])
    with Journal(path, FENCE) as journal:
        assert [s.sample_index for s in journal.samples.values()] == [0, 1]
        journal.add(sample(8, 0))
    assert [(s.prompt_id, s.sample_index) for s in kept(path)] == [(7, 0), (7, 1), (8, 0)]


def test_a_line_that_was_changed_is_dropped(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b'"output_tokens":[3]', b'"output_tokens":[4]'), *lines[2:]]))
    assert [s.sample_index for s in kept(path)] == [1, 2]


def test_lines_of_the_earlier_form_are_read(path: Path) -> None:
    """Python's own json wrote them, with sorted keys and blanks."""
    rows = [{"fence": FENCE}, *(asdict(sample(7, index)) for index in range(3))]
    lines = [json.dumps(row, sort_keys=True).encode() for row in rows]
    path.write_bytes(b"".join(hashlib.sha256(line).hexdigest()[:16].encode() + b" " + line + b"\n" for line in lines))
    assert kept(path) == [sample(7, index) for index in range(3)]
    assert not list(path.parent.glob("*.aside-*"))


def test_routes_come_back_to_the_bit(tmp_path: Path) -> None:
    written = [replace(sample(7, 0), routes=bytes(range(256))), sample(7, 1)]
    with Journal(tmp_path / "samples.journal", FENCE) as journal:
        for each in written:
            journal.add(each)
    assert [each.routes for each in kept(tmp_path / "samples.journal")] == [bytes(range(256)), None]
    assert kept(tmp_path / "samples.journal") == written


def test_numbers_come_back_to_the_bit_and_texts_to_the_letter(tmp_path: Path) -> None:
    values = [-0.1 / 3, -5e-324, -1.7976931348623157e308, 0.0, 1e-4, -2.0, -(2**-24)]
    written = replace(
        sample(2**40, 0), output_logprobs=values, text='\u00e9 \U0001f600 \u2028 "\\\n\x00', reward_parts={"\u00e9": 0.1}
    )
    with Journal(tmp_path / "samples.journal", FENCE) as journal:
        journal.add(written)
    (found,) = kept(tmp_path / "samples.journal")
    assert found == written and list(found.output_logprobs) == values and found.text == written.text


def test_a_sample_that_stands_there_twice_counts_once(path: Path) -> None:
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[1])
    assert len(kept(path)) == 3


def test_a_line_that_finds_no_room_leaves_nothing_and_says_why(path: Path) -> None:
    """The system writes a part of it before it says that there is no room for the rest."""
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, FENCE) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(OSError, match=rf"File too large: \d+ bytes for {path}") as caught:
                journal.add(sample(7, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert classify(caught.value).name == "disk full"
        assert path.read_bytes() == before
        journal.add(sample(7, 4))  # there is room again
    assert kept(path) == [sample(7, index) for index in (0, 1, 2, 4)]


@pytest.mark.parametrize("name", FENCE)
def test_a_journal_of_something_else_is_set_aside(path: Path, name: str) -> None:
    before = path.read_bytes()
    assert kept(path, FENCE | {name: "another"}) == []
    assert path.with_name("samples.journal.aside-0").read_bytes() == before
    assert kept(path) == []
    assert path.with_name("samples.journal.aside-1").exists()


def test_a_journal_without_a_readable_first_line_is_set_aside(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes())
    assert kept(path) == []
    assert path.with_name("samples.journal.aside-0").exists()


def test_an_empty_file_is_a_new_journal(tmp_path: Path) -> None:
    path = tmp_path / "samples.journal"
    path.touch()
    assert kept(path) == []
