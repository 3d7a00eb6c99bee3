"""Commands that are typed in a folder outside of the checkout work as they stand: README.md's example, and a reward with rows of messages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from infra.config import RunConfig
from infra.runs.manifest import read_manifest
from infra.settings import CHECKOUT
from infra.store.files import read_json_lines, write_json_lines
from infra.store.layout import run_folder
from infra.store.samples import read_samples

pytestmark = [pytest.mark.usefixtures("prefect_server", "ends_programs"), pytest.mark.timeout(900)]

SMALL = (
    *("--engine.kind", "scripted", "--trainer.max_mismatch", "null", "--num_steps", "1", "--data.num_prompts", "4"),
    *("--sampling.group_size", "4", "--evaluation.every", "0"),
)
"""What the run is made with besides: a scripted engine and few samples."""
MESSAGES = "ratchet run --preset smoke --name mine --data.source . --data.messages_column messages --reward.name mine.py:reward --reward.timeout_s 3"
REWARD = """def reward(*, completion, messages):
    system, user, said = messages
    assert (system["content"], user["role"], said["content"]) == ("Be short.", "user", completion)
    return len(completion) + 4
"""


def example() -> str:
    readme = (CHECKOUT / "README.md").read_text()
    return next(block for block in re.findall(r"```bash\n(.*?)```", readme, re.DOTALL) if "mine.py" in block)


def ratchet_in(folder: Path, model: Path) -> None:
    """Write the programs `ratchet`, which takes the options of SMALL besides in a run, and `python`."""
    folder.mkdir()
    program = f'{sys.executable} -c "from flows.cli.app import main; main()"'
    (folder / "ratchet").write_text(
        f'#!/bin/sh\ncase "$1" in run) exec {program} "$@" {" ".join(SMALL)} --model {model};; *) exec {program} "$@" --model {model};; esac\n'
    )
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for file in folder.iterdir():
        file.chmod(0o755)


def test_the_example_copied_into_an_empty_folder_makes_a_run(
    scripted: RunConfig, workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("user")
    ratchet_in(place / "bin", Path(scripted.model))
    (place / "empty").mkdir()
    done = typed(place, example())
    assert "169 rows" in done.stdout and "5 of 5 answers above get the 1 that counts as right" in done.stdout
    manifest = read_manifest(run_folder("mine") / "steps/000000")
    assert manifest.config.reward.name == f"{(place / 'empty').resolve()}/mine.py:score"
    assert manifest.config.data.source == f"{place / 'empty'}/my.jsonl"


@pytest.mark.full
def test_a_reward_and_rows_of_messages_from_a_folder_outside(
    scripted: RunConfig, workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("user")
    ratchet_in(place / "bin", Path(scripted.model))
    folder = place / "empty"
    folder.mkdir()
    (folder / "mine.py").write_text(REWARD)
    for split in ("train", "test"):
        write_json_lines(folder / f"{split}.jsonl", [conversation(number, split) for number in range(8)])
    typed(place, MESSAGES)
    step = run_folder("mine") / "steps/000000"
    config = read_manifest(step).config
    assert (config.data.messages_column, config.reward.timeout_s) == ("messages", 3)
    assert config.reward.name == f"{folder.resolve()}/mine.py:reward"
    samples = read_samples(step / "scored.parquet")
    assert [each.unjudged for each in samples] == [""] * 16 and all(each.reward == len(each.text) + 4 for each in samples)
    assert read_json_lines(step / "prompts.jsonl")[0]["row"]["messages"][0]["content"] == "Be short."


def conversation(number: int, split: str) -> dict[str, object]:
    asked = f"What is {number} and {number} in {split}?"
    return {
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": asked}],
        "answer": str(2 * number),
    }


def typed(place: Path, command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user types it in the folder `empty`. Its programs are those of ratchet_in."""
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=place / "empty",
        env=os.environ
        | {
            "PATH": f"{place}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "PREFECT_API_URL": PREFECT_API_URL.value() or "",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
