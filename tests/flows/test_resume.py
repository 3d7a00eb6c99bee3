"""A run goes on from another process and another working directory, by cache hits alone; a step more makes that step only."""

import os
from pathlib import Path
from typing import Any

import pytest
from shared import last_states, step_in

from infra.config import RunConfig
from infra.store.files import read_json
from infra.store.layout import run_folder
from infra.tiny_model.architecture import random_model
from infra.tiny_model.tokenizer import train_tokenizer

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder, tokenizer = tmp_path_factory.mktemp("models") / "random-tiny", train_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, 0).save_pretrained(folder)
    return scripted.but(model=str(folder))


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
