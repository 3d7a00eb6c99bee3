"""The environments in docs/how-to/multi-turn.md are played as they are written there."""

import re
from pathlib import Path

import pytest
from shared import untrained_adapter

from infra.config import EngineConfig, PlayedEnvironment, SamplingConfig
from infra.data.prompts import Prompt
from infra.engines.scripted import ScriptedEngine
from infra.records import PromptBatch
from infra.rewards import client
from infra.settings import CHECKOUT
from infra.store.files import path_of, record_of, write_json_lines
from infra.store.samples import read_samples
from tasks.roll_out import roll_out

PAGE = CHECKOUT / "docs/how-to/multi-turn.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FILE = re.compile(r"`(\w+\.py)`")

pytestmark = pytest.mark.full


def files_of_the_page() -> dict[str, str]:
    """By name: a block belongs to the file that the text before it names last."""
    files: dict[str, str] = {}
    page = PAGE.read_text()
    for block in BLOCK.finditer(page):
        if names := FILE.findall(page[: block.start()].rpartition("\n\n")[0].rpartition("\n\n")[2]):
            files[names[-1]] = files.get(names[-1], "") + "\n\n" + block[1]
    return files


@pytest.mark.parametrize(
    ("name", "said", "reward", "num_turns"),
    [
        ("higher.py:HigherOrLower", "#### 42", 1.0, 1),
        ("higher.py:HigherOrLower", "no idea", 0.0, 4),
        ("higher.py:Saved", "41", 0.0, 4),
        ("agent.py:run", "#### 42", 1.0, 2),
        ("with_tools.py:run", "it is 42", 1.0, 1),
        ("with_tools.py:run", '<tool_call>\n{"name": "times", "arguments": {"a": 6, "b": 7}}\n</tool_call>', 0.0, 4),
    ],
)
def test_an_environment_of_the_page_is_played(
    name: str, said: str, reward: float, num_turns: int, workspace: Path, random_tiny: Path, tmp_path: Path
) -> None:
    for file, content in files_of_the_page().items():
        (tmp_path / file).write_text(content)
    adapter = untrained_adapter(random_tiny)
    row = Prompt(0, 0, f"6 * 7? <say>{said}</say>", "6 * 7 = 42 #### 42", [4, 5, 6], 70)._asdict()
    path = write_json_lines(workspace / "runs/r/steps/000000/prompts.jsonl", [row])
    prompts = PromptBatch(run="r", step=0, file=record_of(path), num_prompts=1, dataset_fingerprint="f", first_row=0)
    config = PlayedEnvironment(name=f"{tmp_path}/{name}", workers=1, max_turns=4, max_failed_frac=0.0)
    engine, sampling = EngineConfig(kind="scripted", max_context_tokens=2048), SamplingConfig(group_size=1, max_output_tokens=96)
    (sample,) = read_samples(path_of(roll_out.fn(engine, sampling, prompts, adapter, None, config).file))
    assert (sample.unjudged, sample.reward, sample.num_turns) == ("", reward, num_turns)
    ScriptedEngine.stop_in(workspace)
    client.close_all()
