"""A deadline whose clock begins once, maybe after the work."""

import asyncio
import time

import pytest

from infra.concurrency.deadline import NO_DEADLINE, Deadline


def test_the_clock_begins_once_and_an_attempt_that_is_made_again_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(20.0)
    assert deadline.may_begin and deadline.left_s is None and not deadline.is_over
    assert deadline.begin() is deadline and not deadline.may_begin
    now += 15
    deadline.begin()
    assert deadline.left_s == 5.0 and deadline.at_most(60.0) == 5.0 and deadline.at_most(3.0) == 3.0
    now += 5
    assert deadline.is_over and deadline.left_s == 0.0 and deadline.at_most(60.0) == 0.0


def test_without_a_limit_it_is_never_over() -> None:
    NO_DEADLINE.begin()
    assert not NO_DEADLINE.may_begin and NO_DEADLINE.left_s is None and NO_DEADLINE.at_most(3.0) == 3.0


def test_waiting_for_it_includes_the_time_before_its_clock_begins() -> None:
    async def seconds() -> float:
        deadline, began = Deadline(0.1), time.monotonic()
        asyncio.get_running_loop().call_later(0.3, deadline.begin)
        await asyncio.wait_for(deadline.passes(), 60)
        return time.monotonic() - began

    assert asyncio.run(seconds()) >= 0.4
