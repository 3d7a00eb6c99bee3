"""Rollouts whose agent calls the tools of an MCP server, and what is said of a server that cannot be used."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import untrained_adapter
from turns import engine_dies_at

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.environments import episodes
from infra.failures import EngineUnavailable
from infra.records import PromptBatch
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.samples import Sample, read_samples
from tasks.roll_out import roll_out

SERVER = Path(__file__).parents[1] / "mcp_server.py"
CALL = '<say><tool_call>\n{"name": "book", "arguments": {"seat": 7}}\n</tool_call></say>'
AGENT = """
from infra.environments.mcp.servers import mcp_tools
from infra.environments.tools import answers_of

async def run(task, client):
    messages = [{"role": "user", "content": task["question"]}]
    for turn in range(3):
        answer = await client.chat(messages, tools=[each.schema for each in mcp_tools()])
        messages += [answer, *answers_of(mcp_tools(), answer)]
    return sum("booked 7" in str(each["content"]) for each in messages)
"""

Play = Callable[..., list[Sample]]


def config_of(folder: Path, fault: str = "") -> PlayedEnvironment:
    (folder / "agent.py").write_text(AGENT)
    words = [sys.executable, str(SERVER), "--notes", str(folder / "notes"), *(["--fault", fault] if fault else [])]
    fields = {"workers": 1, "max_failed_frac": 0.0, "tool_timeout_s": 4.0}
    return PlayedEnvironment(name=f"{folder / 'agent.py'}:run", mcp=(shlex.join(words),), **fields)  # type: ignore[arg-type]


@pytest.fixture
def play(tmp_path: Path, workspace: Path, random_tiny: Path) -> Iterator[Play]:
    adapter = untrained_adapter(random_tiny)
    row = Prompt(0, 0, f"a seat? {CALL}", "7", [4, 5, 6], 70)._asdict()
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [row])
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=1, dataset_fingerprint="f", first_row=0)
    engine, sampling = EngineConfig(kind="scripted", max_context_tokens=4096), SamplingConfig(group_size=1, max_output_tokens=96)

    def made(fault: str = "") -> list[Sample]:
        record = roll_out.fn(engine, sampling, prompts, adapter, None, config_of(tmp_path, fault))
        return read_samples(path_of(record.file))

    yield made
    ScriptedEngine.stop_in(workspace)
    client.close_all()


def booked(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def test_a_servers_tool_is_called_once_in_all_attempts_and_knows_the_calls_key(
    play: Play, tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        engine_dies_at(2, patch)
        with pytest.raises(EngineUnavailable):
            play()
    assert len(booked(tmp_path)) == 2
    (sample,) = play()
    assert sample.reward == 3 and "booked 7" in sample.text
    keys = [key for _, _, key in booked(tmp_path)]
    assert len(keys) == len(set(keys)) == 3 and all(len(key) == 32 for key in keys)


def test_a_server_that_dies_in_a_call_is_an_error_that_the_model_sees(play: Play, tmp_path: Path, workspace: Path) -> None:
    (sample,) = play("dies")
    assert sample.reward == 0 and "ended with 3: no office today" in sample.text
    measures = read_json(workspace / "runs/r/steps/000000/measures/roll_out.json")
    assert (measures["tool_calls"], measures["tool_errors"], len(booked(tmp_path))) == (3, 3, 1)


def test_a_server_that_lists_no_tools_is_refused_before_the_run(tmp_path: Path, workspace: Path) -> None:
    with pytest.raises(ValueError, match=r"environment '.*agent\.py:run': MCP server .* lists no tools"):
        episodes.check(config_of(tmp_path, "no tools"), "s")
    client.close_all()
