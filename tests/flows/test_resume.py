"""A run goes on from another process and another working directory, by cache hits alone; a step more makes that step only."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from infra.config import RunConfig
from infra.settings import CHECKOUT
from infra.store.files import read_json
from infra.store.layout import run_folder
from infra.tiny_model.architecture import random_model
from infra.tiny_model.tokenizer import train_tokenizer

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]

PROGRAM = """
import pathlib, sys
from flows.step import rl_step
from infra.config import RunConfig
state = rl_step(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()), return_state=True)
sys.exit(0 if state.is_completed() else 1)
"""


@pytest.fixture
def config(scripted: RunConfig, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder, tokenizer = tmp_path_factory.mktemp("models") / "random-tiny", train_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, 0).save_pretrained(folder)
    return scripted.but(model=str(folder))


def step_in(folder: Path, config: RunConfig) -> subprocess.CompletedProcess[str]:
    """One rl-step in a process of its own that works in a folder of its own."""
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    url = PREFECT_API_URL.value()
    assert url
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "config.json"],
        cwd=folder,
        env=os.environ | {"PREFECT_API_URL": url, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def last_states() -> dict[str, str]:
    """Of the latest flow run: each task and how it ended."""
    with get_client(sync_client=True) as client:
        flow_run = max(client.read_flow_runs(), key=lambda run: run.created or run.expected_start_time)  # type: ignore[arg-type,return-value]
        return {
            run.name.rpartition("-")[0]: run.state_name or "" for run in client.read_task_runs() if run.flow_run_id == flow_run.id
        }


def changed_at(*names: str) -> list[Any]:
    return [os.stat(run_folder("r") / name).st_mtime_ns for name in names]


def test_a_run_goes_on_from_another_process_and_folder_by_cache_hits_alone_and_then_makes_new_steps_only(
    config: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = tmp_path_factory.mktemp("places")
    broken = step_in(places / "first", config.but(trainer=config.trainer.but(timeout_s=0.05)))
    assert broken.returncode == 1, broken.stdout + broken.stderr
    made = [f"steps/000000/{name}" for name in ("prompts.jsonl", "samples.parquet", "scored.parquet", "batch.safetensors")]
    before = changed_at(*made)
    resumed = step_in(places / "second", config)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    states = last_states()
    assert {name: states[name] for name in ("draw_prompts", "roll_out", "score", "assemble", "train")} == {
        "draw_prompts": "Cached",
        "roll_out": "Cached",
        "score": "Cached",
        "assemble": "Cached",
        "train": "Completed",
    }
    assert changed_at(*made) == before
    made += ["steps/000000/manifest.json", "steps/000000/report.json", "adapters/000001/adapter_model.safetensors"]
    before = changed_at(*made)
    more = step_in(places / "third", config)
    assert more.returncode == 0, more.stdout + more.stderr
    assert changed_at(*made) == before
    assert read_json(run_folder("r") / "steps/000001/manifest.json")["adapter_out"]["num_optimizer_steps"] == 2
