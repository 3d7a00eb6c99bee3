import time

import pytest

from infra.concurrency import polling


@pytest.mark.parametrize(("seconds_ago", "pause_s"), [(0.0, 0.005), (0.5, 0.005), (2.0, 0.05), (60.0, 0.05)])
def test_what_is_mostly_over_at_once_is_looked_at_often_at_first(
    monkeypatch: pytest.MonkeyPatch, seconds_ago: float, pause_s: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    polling.pause(time.monotonic() - seconds_ago)
    assert slept == [pause_s]
