"""The gateway's server in front of the scripted engine, with a plain HTTP client as the agent."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conversations import TOOL, MakeModel

from infra.config import EngineConfig
from infra.engines import open_engine
from infra.engines.scripted import fault_path
from infra.environments.program import run_program
from infra.failures import EngineUnavailable, WrongAnswer
from infra.gateway.http import server
from infra.gateway.http.server import Gateway, OpenSession
from infra.gateway.rendering.admission import renderer_of
from infra.gateway.rendering.messages import ToolCall
from infra.gateway.rendering.tool_calls import hermes_calls
from infra.gateway.session.records import TurnRecord
from infra.gateway.session.session import Episode, TurnLimits
from infra.records import AdapterVersion, BaseModelRef

LIMITS = TurnLimits(temperature=1.0, max_output_tokens=64, max_context_tokens=2048)
EPISODE = Episode("0/0", 0, 0, 5)
PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["question"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("thinking")
print(json.dumps({"reward": float(answer == task["answer"])}))
"""
Post = Callable[..., Awaitable[tuple[int, Any]]]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'


def served(
    folder: Path, agent: Callable[[OpenSession, Post], Awaitable[object]], records: list[TurnRecord] | None = None
) -> OpenSession:
    """Let an agent work with one open session."""
    adapter = AdapterVersion(
        run="r", version=0, base=BaseModelRef(id=str(folder), sha256="b"), rank=1, alpha=1.0, target_modules=("q_proj",), seed=0
    )
    engine = open_engine(EngineConfig(kind="scripted"), adapter)
    engine.wake()
    engine.load_adapter(adapter)

    async def all_of_it() -> OpenSession:
        on_turn = (records if records is not None else []).append
        async with engine.turns(adapter) as turns, Gateway.serving(turns, renderer_of(folder), LIMITS, on_turn) as gateway:
            opened = gateway.open_session(EPISODE)
            async with aiohttp.ClientSession() as client:

                async def post(body: object, path: str = "/chat/completions", key: str = opened.api_key) -> tuple[int, Any]:
                    async with client.post(
                        opened.base_url + path, json=body, headers={"Authorization": f"Bearer {key}"}
                    ) as response:
                        text = await response.text()
                        is_json = response.content_type == "application/json"
                        return response.status, json.loads(text) if is_json else text

                await agent(opened, post)
            return opened

    return asyncio.run(all_of_it())


def asked(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), **more}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_an_agent_with_a_tool_extends_one_trajectory(model_of: MakeModel, workspace: Path) -> None:
    records: list[TurnRecord] = []

    async def agent(opened: OpenSession, post: Post) -> None:
        question = user(f"What is 17 + 25? <say>{CALL}</say>")
        status, first = await post(asked(question, tools=[TOOL], logprobs=True, max_tokens=60))
        (choice,) = first["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (status, choice["finish_reason"], json.loads(call["function"]["arguments"])) == (
            200,
            "tool_calls",
            {"a": 17, "b": 25},
        )
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == records[0].output_logprobs
        assert first["usage"]["completion_tokens"] == len(records[0].output_tokens)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42 <say>It is 42.</say>"}
        _, second = await post(asked(question, choice["message"], result, tools=[TOOL]))
        assert second["choices"][0]["message"]["content"] == "It is 42."
        assert second["choices"][0]["finish_reason"] == "stop"

    opened = served(model_of("Qwen2.5"), agent, records)
    (trajectory,) = opened.session.trajectories("done")
    sampled = [segment.tokens for segment in trajectory.segments if segment.is_sampled]
    assert sampled == [tuple(record.output_tokens) for record in records]
    assert opened.session.counts.branches == 0


def test_a_stream_has_the_answer_in_chunks_and_its_usage(model_of: MakeModel, workspace: Path) -> None:
    async def agent(opened: OpenSession, post: Post) -> None:
        how = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
        _, text = await post(asked(user(f"<say>I add. {CALL}</say>"), **how))
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "I add."
        assert [delta["tool_calls"][0]["function"]["name"] for delta in deltas if "tool_calls" in delta] == ["add"]
        assert chunks[-1]["usage"]["total_tokens"] > 0

    served(model_of("Qwen2.5"), agent)


def test_completions_extend_the_tokens_on_record(model_of: MakeModel, workspace: Path) -> None:
    records: list[TurnRecord] = []

    async def agent(opened: OpenSession, post: Post) -> None:
        prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        _, first = await post({"model": "policy", "prompt": prompt, "logprobs": 0, "max_tokens": 9}, "/completions")
        (choice,) = first["choices"]
        assert choice["logprobs"]["token_logprobs"] == records[0].output_logprobs
        more = f"{prompt}{choice['text']}\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
        await post({"model": "policy", "prompt": more}, "/completions")
        tokens = [*opened.session.trajectories()[0].tokens, 5, 6]
        status, text = await post({"model": "policy", "prompt": tokens, "stream": True}, "/completions")
        assert status == 200 and text.endswith("data: [DONE]\n\n")
        status, answer = await post({"model": "policy", "prompt": ["a", "b"]}, "/completions")
        assert (status, "must be one text" in answer["error"]["message"]) == (400, True)

    (trajectory,) = served(model_of("ChatML"), agent, records).session.trajectories()
    assert [segment.tokens for segment in trajectory.segments if segment.is_sampled] == [
        tuple(each.output_tokens) for each in records
    ]
    assert trajectory.segments[-2].tokens == (5, 6)
    assert trajectory.tokens[0] == 1  # the special token


def test_responses_extend_by_id_or_by_their_items(model_of: MakeModel, workspace: Path) -> None:
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": {}}

    async def agent(opened: OpenSession, post: Post) -> None:
        ask = {"model": "policy", "tools": [tool], "instructions": "Be brief."}
        question = {"role": "user", "content": [{"type": "input_text", "text": f"17 + 25? <say>I add. {CALL}</say>"}]}
        status, first = await post(ask | {"input": [question]}, "/responses")
        assert (status, [item["type"] for item in first["output"]]) == (200, ["message", "function_call"])
        result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "42 <say>42.</say>"}
        _, second = await post(ask | {"input": [question, *first["output"], result]}, "/responses")
        assert second["output"][0]["content"][0]["text"] == "42."
        more = {"input": "Sure? <say>Yes.</say>", "previous_response_id": second["id"], "stream": True}
        _, text = await post(ask | more, "/responses")
        events = [json.loads(part.split("data: ")[1]) for part in text.split("\n\n") if part]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["response"]["output"][0]["content"][0]["text"]) == ("response.completed", "Yes.")
        assert text.startswith("event: response.created\n")
        for fields in (
            {"previous_response_id": "resp_x"},
            {"tools": [tool | {"strict": True}]},
            {"input": [{"type": "computer_call"}]},
        ):
            assert (await post(ask | {"input": "Hi"} | fields, "/responses"))[0] == 400

    opened = served(model_of("Qwen2.5"), agent)
    assert [trajectory.num_turns for trajectory in opened.session.trajectories()] == [3]
    assert opened.session.counts.branches == 0


def test_a_program_of_any_language_is_an_agent(model_of: MakeModel, workspace: Path) -> None:
    async def agent(opened: OpenSession, post: Post) -> None:
        task = {"question": "17 + 25? <say>42</say>", "answer": "42"}
        variables = {"OPENAI_BASE_URL": opened.base_url, "OPENAI_API_KEY": opened.api_key, "OPENAI_MODEL": opened.model}
        command = [sys.executable, "-c", PROGRAM]
        assert await asyncio.to_thread(run_program, command, task, variables, 60) == {"reward": 1.0}

    assert served(model_of("ChatML"), agent).session.counts.turns == 1


REFUSED = (
    ({"n": 2}, "n is 2, it must be 1"),
    ({"stop": ["\n"]}, "stop is"),
    ({"temperature": 0}, "temperature is 0, this rollout samples at 1"),
    ({"top_p": 0.9}, "top_p is 0.9"),
    ({"seed": 3}, "seed is 3"),
    ({"top_logprobs": 5}, "top_logprobs is 5"),
    ({"logit_bias": {"1": 2}}, "logit_bias is"),
    ({"tool_choice": "required"}, "tool_choice is 'required', it must be 'auto' or 'none'"),
    ({"response_format": {"type": "json_object"}}, "response_format is"),
    ({"max_tokens": 0}, "max_tokens is 0, must be a whole number"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ"),
    ({"frequency_penalty": 1}, "frequency_penalty is 1"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls is False"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] must be"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict must be false"),
    ({"guided_regex": "a"}, "guided_regex is not supported; known are"),
    ({"messages": []}, "messages is [], must be a list"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role is 'robot'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "a part whose text is None, must be text"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict must be false"),
)
REFUSED_RESPONSES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tools": 5}, "tools must be a list"),
    ({"instructions": ["Be brief."]}, "instructions is ['Be brief.'], must be text"),
    ({"input": [{"type": "reasoning", "content": "so"}]}, "input[0].content is 'so', must be a list of text parts"),
    ({"input": [{"type": "reasoning", "content": [5]}]}, "input[0].content is [5], must be a list of text parts"),
)
HALF_CHARACTER = '{"name": "add", "arguments": {"a": "\\ud800"}}'
"""JSON that no text can hold."""


def test_what_is_not_served_is_refused_by_name_and_nothing_is_sampled(model_of: MakeModel, workspace: Path) -> None:
    async def agent(opened: OpenSession, post: Post) -> None:
        for fields, message in REFUSED:
            status, answer = await post(asked(user("Hi")) | fields)
            assert (status, message in answer["error"]["message"]) == (400, True), (fields, answer)
        for more, message in REFUSED_RESPONSES:
            status, answer = await post({"model": "policy", "input": "Hi"} | more, "/responses")
            assert (status, message in answer["error"]["message"]) == (400, True), (more, answer)
        for prompt in ([999_999], [2**63]):
            status, answer = await post({"model": "policy", "prompt": prompt}, "/completions")
            assert (status, answer["error"]["message"]) == (400, f"token id {prompt[0]} is not in the model's vocabulary")
        assert (await post(asked(user("Hi")) | {"model": "gpt"}))[0] == 404
        assert (await post(asked(user("Hi")), path="/embeddings"))[0] == 404
        assert (await post(asked(user("Hi")), key="guess"))[0] == 401
        assert (await post(asked(user("Hi"), n=1, stop=None, temperature=1.0, tool_choice="none", user="me")))[0] == 200

    assert served(model_of("ChatML"), agent).session.counts.turns == 1


def test_a_request_that_is_too_long_is_refused_in_openais_form(
    model_of: MakeModel, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)

    async def agent(opened: OpenSession, post: Post) -> None:
        status, answer = await post(asked(user("far " * 3000)))
        assert (status, answer["error"]["message"]) == (400, "the request has more than 1000 bytes: send fewer")

    served(model_of("ChatML"), agent)


@pytest.mark.parametrize("call", [HALF_CHARACTER, '{"name": "\\udc00", "arguments": {}}', "[" * 1500])
def test_a_call_that_no_text_can_hold_stays_in_the_answer(call: str, model_of: MakeModel, workspace: Path) -> None:
    assert hermes_calls(f"<tool_call>{call}</tool_call>", "c") == (f"<tool_call>{call}</tool_call>", ())
    if len(call) > 1000:
        return

    async def agent(opened: OpenSession, post: Post) -> None:
        status, answer = await post(asked(user(f"<say><tool_call>{call}</tool_call></say>"), tools=[TOOL]))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, f"<tool_call>{call}</tool_call>")

    served(model_of("Qwen2.5"), agent)


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_no_text_can_hold_are_rendered_as_they_are(arguments: str) -> None:
    assert ToolCall("c", "add", arguments).parsed == arguments


def test_a_stream_without_text_has_its_log_probabilities(model_of: MakeModel, workspace: Path) -> None:
    records: list[TurnRecord] = []

    async def agent(opened: OpenSession, post: Post) -> None:
        _, text = await post(asked(user("<say></say>"), stream=True, logprobs=True))
        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
        found = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [entry["logprob"] for entry in found] == records[0].output_logprobs

    served(model_of("ChatML"), agent, records)


def test_a_conversation_without_room_is_refused_as_too_long(model_of: MakeModel, workspace: Path) -> None:
    async def agent(opened: OpenSession, post: Post) -> None:
        status, answer = await post(asked(user("far " * 3000)))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert (await post(asked(user("Hi"))))[1]["error"]["code"] == "context_length_exceeded"

    assert served(model_of("ChatML"), agent).session.stop_reason == "context"


@pytest.mark.parametrize(("fault", "error"), [("dies", EngineUnavailable), ("NaN", WrongAnswer), ("no output", WrongAnswer)])
def test_an_engine_that_fails_ends_all_turns_and_raises(
    fault: str, error: type[Exception], model_of: MakeModel, workspace: Path
) -> None:
    async def agent(opened: OpenSession, post: Post) -> None:
        assert (await post(asked(user("Hi"))))[0] == 200
        fault_path().parent.mkdir(parents=True, exist_ok=True)
        fault_path().write_text(fault)
        assert (await post(asked(user("Hi again"))))[0] == 503
        fault_path().unlink()
        assert (await post(asked(user("Once more"))))[0] == 503

    records: list[TurnRecord] = []
    with pytest.raises(error):
        served(model_of("ChatML"), agent, records)
    assert len(records) == 1
