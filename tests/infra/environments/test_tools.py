"""Tools: the schema of a function, what becomes of a model's calls, and the limits of a call."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from tool_journal import recorded

from infra.environments.limits import StepTimeOut, limited
from infra.environments.tools import CUT, Tool, ToolLimits, answers_of, call_key, tool


@tool
def search(words: str, limit: int = 3) -> list[str]:
    """Search the files.

    Not shown to the model.
    """
    return [words] * limit


def called(name: str, arguments: str) -> str:
    call = {"id": "call_1", "function": {"name": name, "arguments": arguments}}
    (answer,) = answers_of([search], {"role": "assistant", "tool_calls": [call]})
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "call_1")
    return str(answer["content"])


def test_a_tools_schema_comes_from_its_signature() -> None:
    properties = {"words": {"type": "string"}, "limit": {"type": "integer"}}
    assert search.schema["function"] == {
        "name": "search",
        "description": "Search the files.",
        "parameters": {"type": "object", "properties": properties, "required": ["words"]},
    }


def test_a_parameter_without_a_known_type_is_refused_by_name() -> None:
    def f(x: bytes) -> None: ...

    with pytest.raises(ValueError, match="tool 'f': parameter 'x' must be one of str, int"):
        Tool(f).schema  # noqa: B018  # it is computed


def test_a_parameter_that_a_call_cannot_name_is_refused() -> None:
    def many(*words: str) -> str:
        return "".join(words)

    def more(**words: str) -> str:
        return "".join(words)

    def first(word: str, /) -> str:
        return word

    for function in (many, more, first):
        with pytest.raises(ValueError, match=rf"^tool '{function.__name__}': parameter .* has no name in a model's call"):
            Tool(function).schema  # noqa: B018  # it is computed


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^two tools have one name, of search, search: rename one"):
        answers_of([search, Tool(search.function)], {"role": "assistant"})


def test_types_that_are_written_as_text_are_read() -> None:
    """As with `from __future__ import annotations`."""

    def times(a: "int", b: "float" = 1.0) -> "float":
        return a * b

    parameters = tool(times).schema["function"]["parameters"]
    assert parameters["properties"] == {"a": {"type": "integer"}, "b": {"type": "number"}}


def test_an_async_function_is_no_tool() -> None:
    async def times(a: int) -> int:
        return a

    with pytest.raises(ValueError, match=r"^tool 'times' is async: a tool is a plain function, write it with def$"):
        tool(times)


def test_outside_of_episodes_a_tool_is_a_plain_function() -> None:
    assert search("a", limit=2) == ["a", "a"]


def test_a_call_that_cannot_be_made_has_an_error_as_its_result() -> None:
    assert called("search", '{"words": "a", "limit": 1}') == '["a"]'
    assert called("find", "{}") == "error: no tool 'find'; there are search"
    assert called("search", "{}").startswith("error: arguments of 'search': missing a required argument")
    assert called("search", "{").startswith("error: arguments of 'search': ")
    assert called("search", "[1]").startswith("error: arguments of 'search': ")
    assert called("search", '{"words": NaN}').startswith("error: arguments of 'search': ")
    assert called("search", '{"words": ' + "[" * 2000 + "]" * 2000 + "}").startswith("error: arguments of 'search': ")
    assert called("search", '{"words": ' + "[" * 500 + "]" * 500 + "}").startswith("error: arguments of 'search': ")


Make = Callable[..., tuple[object, bool]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Call a function as a tool within limits. Returns its result and whether it is an error, as the journal has them."""

    def made(function: Callable[..., Any], timeout_s: float = 5.0, most: int = 20) -> tuple[object, bool]:
        with recorded(ToolLimits(timeout_s, most)) as journal:
            result = Tool(function)()
        ((kept, is_error),) = journal.results
        assert kept == result
        orjson.dumps(kept)  # as the gateway writes it
        return kept, is_error

    return made


def hang() -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001  # a tool that goes on whatever happens
            continue


def in_a_thread(call: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and not failed


def test_a_tool_that_takes_too_long_has_an_error_as_its_result(make: Make) -> None:
    begin = time.monotonic()
    expected = ("error: 'hang' took longer than environment.tool_timeout_s 0.3", True)
    assert make(hang, timeout_s=0.3, most=200) == expected
    in_a_thread(lambda: assert_equal(make(hang, timeout_s=0.3, most=200), expected))
    assert time.monotonic() - begin < 50


def test_a_call_in_a_thread_of_the_environments_own_is_on_record() -> None:
    with recorded() as journal:
        in_a_thread(lambda: assert_equal(search("a", limit=1), ["a"]))
    assert journal.results == [(["a"], False)]
    assert search("a", limit=1) == ["a"] and len(journal.results) == 1


def assert_equal(found: object, expected: object) -> None:
    assert found == expected


def test_the_time_of_a_turn_goes_on_during_a_tool_and_after_it(make: Make) -> None:
    with pytest.raises(StepTimeOut, match=r"turn_timeout_s 0\.3"), limited(0.3):
        make(lambda: time.sleep(60), timeout_s=5)
    with pytest.raises(StepTimeOut, match=r"turn_timeout_s 2"), limited(2.0):
        assert make(lambda: time.sleep(0.1), timeout_s=1.5) == (None, False)
        time.sleep(60)


@pytest.mark.parametrize(
    ("function", "result", "is_error"),
    [
        (lambda: "a" * 20, "a" * 20, False),
        (lambda: "a" * 30 + "z" * 30, f"{'a' * 10}{CUT}{'z' * 10}", False),
        (lambda: list(range(20)), "error: the result has 70 characters, 20 are allowed", True),
        (lambda: (1, 2), [1, 2], False),
        (lambda: 2**64, float(2**64), False),
        (lambda: float("nan"), "error: the result is no JSON: Out of range float values", True),
        (lambda: "\ud800", "error: the result is no JSON: ", True),
        (lambda: {1, 2}, "error: the result is no JSON: ", True),
        (lambda: orjson.loads("[" * 500 + "]" * 500), "error: the result is no JSON: ", True),
        (lambda: 1 / 0, "error: ZeroDivisionError: division by zero", True),
        (lambda: exit(3), "error: SystemExit: 3", True),
    ],
)
def test_a_result_is_cut_or_refused_and_never_raised(
    function: Callable[..., Any], result: object, is_error: bool, make: Make
) -> None:
    found, was_error = make(function)
    assert was_error == is_error
    assert found == result or (is_error and str(found).startswith(str(result)))


def test_a_tool_that_raises_a_text_that_cannot_be_written_has_an_error(make: Make) -> None:
    def odd() -> None:
        raise ValueError("\ud800")

    assert make(odd) == ("error: ValueError: ?", True)


def test_a_tool_knows_the_key_of_its_call(make: Make) -> None:
    assert make(call_key) == ("k1", False)
    assert call_key() == ""


def test_parameters_may_have_any_name() -> None:
    def odd(seconds: int = 1, function: int = 2, arguments: int = 3) -> list[int]:
        return [seconds, function, arguments]

    with recorded():
        assert Tool(odd)(seconds=4, function=5, arguments=6) == [4, 5, 6]
