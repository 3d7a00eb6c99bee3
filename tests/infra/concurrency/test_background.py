import contextvars
import sys
import threading

import pytest

from infra.concurrency.background import TURN_S, in_background, run_concurrently
from infra.store import check_costs

WHO = contextvars.ContextVar("WHO", default="nobody")
DEADLINE_S = 60.0


def test_calls_are_under_way_together_and_each_has_its_callers_context() -> None:
    all_are_there = threading.Barrier(3)

    def asked(number: int) -> tuple[int, str]:
        all_are_there.wait(DEADLINE_S)
        return number, WHO.get()

    token = WHO.set("a flow run")
    with run_concurrently(3) as ask:
        answers = [ask(asked, number) for number in range(3)]
    WHO.reset(token)
    assert [answer.result() for answer in answers] == [(number, "a flow run") for number in range(3)]


def test_from_then_on_a_thread_that_works_hands_python_over_soon() -> None:
    sys.setswitchinterval(1.0)
    with run_concurrently(1):
        pass
    assert sys.getswitchinterval() == pytest.approx(TURN_S)


def test_with_one_thread_they_are_made_one_after_the_other() -> None:
    has_begun = threading.Event()
    with run_concurrently(1) as ask:
        first = ask(has_begun.wait, 0.2)
        ask(has_begun.set)
    assert not first.result(), "the second one did not wait for the first"


def test_an_error_is_that_of_its_own_call_and_the_others_end_before_the_block_does() -> None:
    may_go_on, has_ended = threading.Event(), threading.Event()

    def slow() -> None:
        assert may_go_on.wait(DEADLINE_S)
        has_ended.set()

    with run_concurrently(2) as ask:
        failed, ended = ask(int, "x"), ask(slow)
        with pytest.raises(ValueError, match="'x'"):
            failed.result()
        may_go_on.set()
    assert has_ended.is_set()
    assert ended.result() is None


def test_seconds_of_calls_within_a_counted_one_are_counted_once() -> None:
    @check_costs.counted("inner")
    def inner() -> None: ...

    @check_costs.counted("outer")
    def outer() -> None:
        with run_concurrently(1) as ask:
            ask(inner).result()

    check_costs.taken()
    outer()
    assert list(check_costs.taken()) == ["outer"]


def test_a_call_beside_a_block_goes_on_meanwhile_and_is_over_at_its_end() -> None:
    both_are_there, has_ended = threading.Barrier(2), threading.Event()

    def call(what: str, *, end: threading.Event) -> None:
        both_are_there.wait(DEADLINE_S)
        assert what == "engine"
        end.set()

    with in_background(call, "engine", end=has_ended):
        both_are_there.wait(DEADLINE_S)
    assert has_ended.is_set()


def test_what_a_call_beside_a_block_raises_comes_after_it_also_where_the_block_has_raised() -> None:
    done = []
    with pytest.raises(ValueError, match="'x'"), in_background(int, "x"):
        done.append("the block")
    assert done == ["the block"]
    with pytest.raises(ValueError, match="'x'") as caught, in_background(int, "x"):
        raise KeyError("block")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="block"), in_background(int, "1"):
        raise KeyError("block")
