"""Whole runs in this process: a real trainer, a scripted engine, and a model with random weights.

The scripted engine answers an exam by chance and the same each time, whatever the adapter: pass@1 never moves.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.states import State

from flows.evaluate import evaluate
from flows.run import rl_run
from infra.config import EvaluationConfig, ExportConfig, RetentionConfig, RunConfig
from infra.data import arithmetic
from infra.eval_records import Evaluation, EvaluationReport, RunReport
from infra.settings import CHECKOUT, settings
from infra.store.files import read_json, read_json_lines, write_json_lines
from infra.store.layout import run_folder
from infra.tracking import mlflow_store

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    return scripted.but(
        num_steps=1,
        evaluation=EvaluationConfig(every=2, num_prompts=8, num_samples=4, pass_at_k=(4,)),
        retention=RetentionConfig(keep_last=1, keep_best=False),
        export=ExportConfig(what="merged", which="latest"),
    )


def run(config: RunConfig) -> State[RunReport]:
    """In this test's workspace; the flow's own result storage was fixed when it was imported."""
    return rl_run.with_options(result_storage=settings().results)(config, return_state=True)


def examined(config: RunConfig, adapter: int | str | None) -> State[EvaluationReport]:
    return evaluate.with_options(result_storage=settings().results)(config, adapter, return_state=True)


def only(state: State[EvaluationReport]) -> Evaluation:
    (made,) = state.result().evaluations
    return made


def answers() -> dict[str, float]:
    """When the greedy answers of each evaluation were written, by folder."""
    return {
        path.parent.name[:6]: os.stat(path).st_mtime_ns for path in (run_folder("r") / "evaluations").glob("*/greedy.parquet")
    }


def test_a_run_that_is_made_longer_goes_on_where_it_ended_and_does_nothing_twice(config: RunConfig) -> None:
    first = run(config).result()
    assert (first.num_steps, first.stopped) == (1, "all steps made")
    assert [each.step for each in first.evaluations] == [0, 1]
    before, weights = answers(), first.latest.weights
    longer = config.but(num_steps=3)
    second = run(longer).result()
    assert [each.step for each in second.evaluations] == [0, 1, 2, 3]
    assert before.items() <= answers().items(), "evaluated again"
    assert read_json(run_folder("r") / "steps/000001/manifest.json")["adapter_in"]["weights"]["sha256"] == weights.sha256  # type: ignore[union-attr]

    adapters = run_folder("r") / "adapters"
    for moment in ("exp_avg", "exp_avg_sq"):
        paths = [adapters / f"{version:06d}/state/{moment}.safetensors" for version in (1, 2, 3)]
        assert [path.exists() for path in paths] == [False, False, True]
    assert all((adapters / f"{version:06d}/adapter_model.safetensors").exists() for version in (1, 2, 3))
    for exported in ("adapter/adapter_model.safetensors", "merged/model.safetensors", "merged/tokenizer.json"):
        assert (run_folder("r") / "export" / exported).exists()
    assert read_json(run_folder("r") / "export/merged/inputs_key.json")["version"] == 3

    subprocess.run(
        [sys.executable, "-m", "infra.tracking.upload"], cwd=CHECKOUT, check=True
    )  # all is in the store when this returns
    client = MlflowClient(mlflow_store.uri(), mlflow_store.uri())
    memory = read_json(run_folder("r") / "mlflow.json")
    history = client.get_metric_history(memory["run_id"], "eval/pass_at_1")
    assert [(row.step, row.value) for row in history] == [(each.step, each.pass_at_1) for each in second.evaluations]
    assert client.get_model_version_by_alias("r", "best").tags["ratchet.adapter"] == "1"

    made = sorted(run_folder("r").glob("steps/*/manifest.json"))
    third = run(longer.but(num_steps=2)).result()
    assert (third.num_steps, sorted(run_folder("r").glob("steps/*/manifest.json"))) == (3, made)


@pytest.mark.full  # two steps and three evaluations: the prompts go through every task that draws them
def test_a_run_on_a_single_file_asks_what_no_step_was_given(config: RunConfig, tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "own.jsonl", arithmetic.problems("train", 24))
    own = config.but(num_steps=2, data=config.data.but(source=str(path)), export=ExportConfig(what="nothing"))
    made = run(own).result()
    assert [(each.num_prompts, each.num_overlapping) for each in made.evaluations] == [(6, 0), (6, 0)]
    asked = questions_in("evaluations/*/prompts.jsonl")
    drawn = questions_in("steps/*/prompts.jsonl")
    assert (len(asked), len(drawn)) == (6, 8) and not asked & drawn


def questions_in(pattern: str) -> set[str]:
    return {row["question"] for path in run_folder("r").glob(pattern) for row in read_json_lines(path)}


def test_a_run_without_progress_ends(config: RunConfig) -> None:
    patient = config.but(num_steps=6, evaluation=config.evaluation.but(every=1, patience=1), export=ExportConfig(what="nothing"))
    made = run(patient).result()
    assert (made.num_steps, made.stopped, made.best.version) == (1, "no progress", 0)
    again = run(patient).result()
    assert again == made
    assert not (run_folder("r") / "export").exists()


def test_a_step_that_fails_ends_the_run_and_the_next_call_makes_it(config: RunConfig) -> None:
    failed = run(config.but(trainer=config.trainer.but(timeout_s=0.05)))
    assert failed.is_failed()
    assert "was ended after 0.05 s" in (failed.message or "")
    before = answers()
    assert run(config).result().num_steps == 1
    assert answers()["000000"] == before["000000"]


def test_another_configuration_under_the_name_of_a_run_is_refused_with_the_difference(config: RunConfig) -> None:
    alone = config.but(evaluation=EvaluationConfig(every=0), export=ExportConfig(what="nothing"))
    assert run(alone).is_completed()
    refused = run(alone.but(seed=3, data=alone.data.but(num_prompts=2)))
    assert refused.is_failed()
    assert "seed 0 -> 3; data.num_prompts 4 -> 2" in (refused.message or "")


def test_an_exam_that_cannot_be_held_is_refused_before_anything_is_begun(config: RunConfig, workspace: Path) -> None:
    refused = run(config.but(evaluation=config.evaluation.but(split="validation")))
    assert refused.is_failed()
    assert "evaluation: the generated data set 'arithmetic' has the splits train and test, not 'validation'" in (
        refused.message or ""
    )
    assert not (workspace / "runs").exists()


def test_an_evaluation_whose_folder_was_removed_is_made_again(config: RunConfig) -> None:
    """As its error says for one that is damaged, and as a drop does: the adapter that is made again may be the same one."""
    made = only(examined(config, 0))
    (folder,) = (run_folder("r") / "evaluations").iterdir()
    before = answers()
    assert only(examined(config, 0)) == made and answers() == before, "asked once"
    shutil.rmtree(folder)
    assert only(examined(config, 0)) == made
    assert read_json(folder / "evaluation.json")["record"] == made.model_dump(mode="json") and answers() != before


def test_base_adapter_folder_and_whole_model_can_be_evaluated(config: RunConfig, model: Path, tmp_path: Path) -> None:
    run(config.but(evaluation=EvaluationConfig(every=0))).result()
    base, latest = (only(examined(config, adapter)) for adapter in (0, None))
    assert (base.step, base.adapter_sha256, latest.step) == (0, "base", 1)
    export = run_folder("r") / "export"
    folder = shutil.copytree(export / "adapter", tmp_path / "elsewhere")
    found = only(examined(config, str(folder)))
    assert (found.adapter_sha256, found.eval_digest) == (latest.adapter_sha256, latest.eval_digest)
    about = folder / "adapter_config.json"
    about.write_text(about.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    louder = only(examined(config, str(folder)))
    assert louder.adapter_sha256 == found.adapter_sha256 and louder.run != found.run, "equal weights, another scale"
    whole = only(examined(config, str(export / "merged")))
    assert whole.run.startswith("external-") and whole.run != found.run
    beyond, neither = examined(config, 2), examined(config, str(tmp_path / "nowhere"))
    assert "has the adapter versions 0 (the base model) to 1, not 2" in (beyond.message or "")
    assert "is neither a version of the run, nor a folder" in (neither.message or "")
