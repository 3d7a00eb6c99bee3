"""A rollout of the example agent with tools, whose model calls one in its own words."""

from pathlib import Path

from shared import untrained_adapter

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.records import PromptBatch
from infra.rewards import client
from infra.store.files import path_of, read_json, record_of, write_json_lines
from infra.store.samples import read_samples
from tasks.roll_out import roll_out

CALL = '<say><tool_call>\n{"name": "calculate", "arguments": {"expression": "17 + 25"}}\n</tool_call></say>'


def test_a_models_tool_call_is_made_and_its_result_given_back(workspace: Path, random_tiny: Path) -> None:
    adapter = untrained_adapter(random_tiny)
    row = Prompt(0, 0, f"17 + 25? {CALL}", "#### 42", [4, 5, 6], 70)._asdict()
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [row])
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=1, dataset_fingerprint="f", first_row=0)
    config = PlayedEnvironment(name="infra.environments.examples.tool_agent.run", workers=1, max_failed_frac=0.0)
    engine, sampling = EngineConfig(kind="scripted", max_context_tokens=2048), SamplingConfig(group_size=1, max_output_tokens=96)
    (sample,) = read_samples(path_of(roll_out.fn(engine, sampling, prompts, adapter, None, config).file))
    assert sample.num_turns > 1 and "42" in sample.text
    assert read_json(workspace / "runs/r/steps/000000/measures/roll_out.json")["tool_calls"] == sample.num_turns
    ScriptedEngine.stop_in(workspace)
    client.close_all()
