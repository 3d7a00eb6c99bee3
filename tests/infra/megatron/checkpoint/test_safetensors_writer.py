"""The writer makes the library's files, and their digests."""

import ctypes
import hashlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.megatron.checkpoint import safetensors_writer


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "z": torch.randn(3, 5, generator=generator),
        "a": torch.randn(7, generator=generator).bfloat16(),
        "m.ü": torch.arange(6).reshape(2, 3),
        "b": torch.randn(2, 2, generator=generator),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
    }


def hinted() -> None:
    """Wait until the kernel has all hints."""
    safetensors_writer._HINTS.submit(lambda: None).result()


@pytest.mark.parametrize("length", range(1, 17))  # of a head that has to be filled up to a multiple of eight
def test_bytes_are_the_librarys(length: int, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "theirs", {"format": "p" * length})
    safetensors_writer.write(tmp_path / "ours", safetensors_writer.body_of(tensors), {"format": "p" * length})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_digest_is_the_files(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    said = safetensors_writer.write(tmp_path / "file", safetensors_writer.body_of(tensors), {})
    assert said == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_a_body_is_written_again_with_what_its_tensors_hold_by_then(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    body = safetensors_writer.body_of(tensors)
    safetensors_writer.write(tmp_path / "first", body, {"number": "1"})
    tensors["z"] += 1.0
    said = safetensors_writer.write(tmp_path / "ours", body, {"number": "2"})
    save_file(tensors, tmp_path / "theirs", {"number": "2"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes() != (tmp_path / "first").read_bytes()
    assert said == hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()


@pytest.mark.parametrize("size", [3, 4096, 1 << 20])
def test_the_disk_is_asked_to_begin_with_each_piece_of_a_file_once(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    begin = safetensors_writer._begin_to_write_out
    monkeypatch.setattr(safetensors_writer, "WRITE_OUT_EVERY", 4096)
    monkeypatch.setattr(
        safetensors_writer, "_begin_to_write_out", lambda file, at, length: (asked.append((at, length)), begin(file, at, length))
    )
    tensors = {"many": torch.randn(size // 4), **{f"few {i}": torch.randn(300) for i in range(30)}}
    save_file(tensors, tmp_path / "theirs", {})
    hinted()
    open_before = len(os.listdir("/proc/self/fd"))
    safetensors_writer.write(tmp_path / "ours", safetensors_writer.body_of(tensors), {})
    hinted()
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    ends = [0, *(at + length for at, length in asked)]
    assert [at for at, _ in asked] == ends[:-1], "no gap, and nothing twice"
    assert 0 <= (tmp_path / "ours").stat().st_size - ends[-1] < 4096
    assert all(length < 2 * 4096 for _, length in asked), "while the file is written, not after a large tensor"


def test_a_disk_that_cannot_be_asked_gets_the_file_all_the_same(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer, "WRITE_OUT_EVERY", 1)
    monkeypatch.setattr(safetensors_writer, "_libc", lambda: None)
    said = safetensors_writer.write(tmp_path / "file", safetensors_writer.body_of(tensors), {})
    hinted()
    assert said == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_a_file_does_not_wait_for_a_disk_whose_queue_is_full(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room, waited = threading.Event(), []

    def wait(*_: object) -> None:
        waited.append(threading.current_thread())
        has_room.wait(5)

    monkeypatch.setattr(safetensors_writer, "WRITE_OUT_EVERY", 256)
    monkeypatch.setattr(safetensors_writer, "_libc", lambda: SimpleNamespace(sync_file_range=wait))
    said = safetensors_writer.write(tmp_path / "file", safetensors_writer.body_of(tensors), {})
    assert said == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    has_room.set()
    hinted()
    assert waited and threading.current_thread() not in waited


def test_the_kernel_understands_the_hint(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(bytes(8192))
        begin, size = ctypes.c_int64(0), ctypes.c_int64(8192)
        assert safetensors_writer._libc().sync_file_range(file.fileno(), begin, size, safetensors_writer._START_WRITEBACK) == 0
        assert safetensors_writer._libc().sync_file_range(file.fileno(), begin, size, 1 << 30) == -1, (
            "a flag that it does not know"
        )


def test_a_file_without_tensors_is_the_librarys(tmp_path: Path) -> None:
    save_file({}, tmp_path / "theirs", {"format": "pt"})
    safetensors_writer.write(tmp_path / "ours", safetensors_writer.body_of({}), {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_library_reads_it(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    safetensors_writer.write(tmp_path / "file", safetensors_writer.body_of(tensors), {"format": "pt"})
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)


def test_tensors_that_follow_each_other_in_memory_are_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, other = torch.randn(20), torch.randn(6)
    # c begins in the middle of the memory; d follows it; e is elsewhere; f is d's neighbour, but not the next name; h is of another dtype.
    tensors = {
        "a": memory[:6].view(2, 3),
        "b": memory[6:7],
        "c": memory[8:12],
        "d": memory[12:14],
        "e": other,
        "f": memory[14:],
        "h": memory[14:].view(torch.bfloat16)[:4],
    }
    hashed: list[int] = []
    update = safetensors_writer._update

    def noted(digest: Any, parts: list[memoryview]) -> None:
        hashed.extend(len(part) for part in parts[1:])
        update(digest, parts)

    monkeypatch.setattr(safetensors_writer, "_update", noted)
    said = safetensors_writer.write(tmp_path / "ours", safetensors_writer.body_of(tensors), {})
    assert hashed == [28, 24, 24, 24, 8]
    assert said == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    assert load_file(tmp_path / "ours").keys() == tensors.keys()
    assert all(torch.equal(read, tensors[name]) for name, read in load_file(tmp_path / "ours").items())


def test_tensors_in_an_order_of_their_own_are_one_part_that_the_library_reads(tmp_path: Path) -> None:
    memory = torch.randn(3, 5)
    tensors = {"c": memory[0], "a": memory[1], "b": memory[2]}
    body = safetensors_writer.body_of(tensors, in_order=True)
    assert (len(body.parts), len(safetensors_writer.body_of(tensors).parts)) == (1, 2)
    said = safetensors_writer.write(tmp_path / "ours", body, {"format": "pt"})
    assert said == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("bad", [torch.ones(2, dtype=torch.complex64), torch.ones(3, 4).T])
def test_what_cannot_be_written_is_named(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"tensor odd is .* written are contiguous tensors on the host of torch\.float32"):
        safetensors_writer.body_of({"odd": bad})
