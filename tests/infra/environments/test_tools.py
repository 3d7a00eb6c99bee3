"""Tools: the schema of a function, and what becomes of a model's calls."""

import pytest

from infra.environments.tools import Tool, answers_of, tool


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


def test_outside_of_episodes_a_tool_is_a_plain_function() -> None:
    assert search("a", limit=2) == ["a", "a"]


def test_a_call_that_cannot_be_made_has_an_error_as_its_result() -> None:
    assert called("search", '{"words": "a", "limit": 1}') == '["a"]'
    assert called("find", "{}") == "error: no tool 'find'; there are search"
    assert called("search", "{}").startswith("error: arguments of 'search': missing a required argument")
    assert called("search", "{").startswith("error: arguments of 'search': ")
