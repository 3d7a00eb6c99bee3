"""The example of README.md for a task of one's own, copied into an empty folder, works as it stands."""

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
from infra.store.layout import run_folder

pytestmark = [pytest.mark.usefixtures("prefect_server", "ends_programs"), pytest.mark.timeout(900)]

SMALL = (
    *("--engine.kind", "scripted", "--trainer.max_mismatch", "null", "--num_steps", "1", "--data.num_prompts", "4"),
    *("--sampling.group_size", "4", "--evaluation.every", "0"),
)
"""What the run is made with besides: a scripted engine and few samples."""


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
    done = subprocess.run(
        ["bash", "-e", "-c", example()],
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
    assert "169 rows" in done.stdout and "5 of 5 answers above get the 1 that counts as right" in done.stdout
    manifest = read_manifest(run_folder("mine") / "steps/000000")
    assert manifest.config.reward.name == f"{(place / 'empty').resolve()}/mine.py:score"
    assert manifest.config.data.source == f"{place / 'empty'}/my.jsonl"
