"""Seconds are summed by kind, and none is counted twice."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.store import check_costs, digests


@pytest.fixture(autouse=True)
def _anew() -> None:
    check_costs.taken()


@check_costs.counted("inner")
def inner() -> None:
    time.sleep(0.02)


@check_costs.counted("outer")
def outer() -> None:
    inner()


def test_seconds_are_summed_by_kind() -> None:
    inner()
    inner()
    assert 0.04 <= check_costs.taken()["inner"] < 0.5


def test_a_counted_call_inside_another_is_not_counted_twice() -> None:
    outer()
    assert list(check_costs.taken()) == ["outer"]


def test_a_call_that_fails_counts_and_the_next_one_too() -> None:
    @check_costs.counted("check")
    def check(path: Path) -> None:
        path.read_bytes()

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            check(Path("/nowhere"))
    assert list(check_costs.taken()) == ["check"]


def test_digests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10**6)
    digests.sha256_of(tmp_path / "file")
    assert check_costs.taken()["digests"] > 0


def test_no_second_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()

    def one_more() -> float:
        clock.now = getattr(clock, "now", 0) + 1
        return float(clock.now)

    monkeypatch.setattr(check_costs, "time", SimpleNamespace(perf_counter=one_more))
    checked, summed, usual = check_costs.counted("checks")(lambda: None), 0.0, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(lambda: [checked() for _ in range(100)]) for _ in range(200)]
            while not all(call.done() for call in calls):
                summed += check_costs.taken().get("checks", 0.0)
    finally:
        sys.setswitchinterval(usual)
    assert summed + check_costs.taken().get("checks", 0.0) == 200 * 100
