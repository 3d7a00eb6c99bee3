"""Seconds are summed by kind, and none is counted twice."""

import time
from pathlib import Path

import pytest

from infra import digests, spans


@pytest.fixture(autouse=True)
def _anew() -> None:
    spans.taken()


@spans.counted("inner")
def inner() -> None:
    time.sleep(0.02)


@spans.counted("outer")
def outer() -> None:
    inner()


def test_seconds_are_summed_by_kind() -> None:
    inner()
    inner()
    assert 0.04 <= spans.taken()["inner"] < 0.5


def test_a_counted_call_inside_another_is_not_counted_twice() -> None:
    outer()
    assert list(spans.taken()) == ["outer"]


def test_a_call_that_fails_counts_and_the_next_one_too() -> None:
    @spans.counted("check")
    def check(path: Path) -> None:
        path.read_bytes()

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            check(Path("/nowhere"))
    assert list(spans.taken()) == ["check"]


def test_digests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10**6)
    digests.sha256_of(tmp_path / "file")
    assert spans.taken()["digests"] > 0
