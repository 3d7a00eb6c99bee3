"""A run whose steps draw rows by their measured pass rates: prefetched, resumed, replayed, forked and made on from a store's copy.

A real trainer and a scripted engine.
"""

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from shared import becomes, program_with

from flows.replay import replay_step
from flows.run import rl_run
from flows.step import rl_step
from infra.config import EvaluationConfig, RunConfig
from infra.data.forms.curriculum import rates_of
from infra.eval_records import RunReport
from infra.mirror import copying, fetching
from infra.records import StepReport
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import path_of, read_json_lines
from infra.store.layout import StepFolder, run_folder, step_folder_of

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(1800)]

PROGRAM = """
import pathlib, sys
from flows.step import rl_step
from infra.config import RunConfig
config = RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes())
while not pathlib.Path(sys.argv[2]).exists():
    rl_step(config)
"""
WAITS_IN_STEP_1 = """
import os, pathlib, time
root = pathlib.Path(os.environ["RATCHET_WORKSPACE"])
def score(*, question, sample_index):
    while (root / "runs/r/steps/000001").exists() and not (root / "go").exists():
        time.sleep(0.05)
    return float((sum(map(ord, question)) + sample_index) % 3 == 0)
"""


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    data = scripted.data.but(curriculum="uncertain")
    trainer = scripted.trainer.but(mode="persistent")
    return scripted.but(num_steps=3, data=data, trainer=trainer, evaluation=EvaluationConfig(every=0))


def run(config: RunConfig) -> RunReport:
    return rl_run.with_options(result_storage=settings().results)(config)


def step_of(config: RunConfig) -> StepReport:
    return rl_step.with_options(result_storage=settings().results)(config)


def digests(run: str, step: int) -> dict[str, Any]:
    made = read_manifest(step_folder_of(run, step))
    files = {"pass rates": made.prompts.pass_rates, "prompts": made.prompts.file, "scored": made.scored.file}
    return {name: file.sha256 if file else None for name, file in files.items()}


def test_a_run_draws_by_the_rates_of_the_steps_before_and_so_do_its_replay_its_fork_and_its_copy(
    config: RunConfig, caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        run(config)
    assert "the rollout of step 2 begins" in caplog.text
    seen: set[int] = set()
    for step in range(3):
        folder = StepFolder.at("r", step)
        made = read_manifest(folder.path)
        assert made.prompts.pass_rates and path_of(made.prompts.pass_rates) == folder.pass_rates
        known = rates_of(read_json_lines(folder.pass_rates))
        assert known.keys() == seen
        assert all(rate.num_judged == 4 and rate.step < step for rate in known.values())
        assert made.prompts.draw_counts["curriculum/num_measured_rows"] == len(seen)
        seen |= {line["row_number"] for line in read_json_lines(folder.prompts)}

    replay = replay_step.with_options(result_storage=settings().results)
    replay("r", 1, "again", "draw_prompts")
    replay("r", 1, "fork", "score")
    for name in ("again", "fork"):
        assert digests(name, 1) == digests("r", 1)
        step_of(config.but(name=name))
        assert digests(name, 2) == digests("r", 2)

    store = f"file://{tmp_path_factory.mktemp('store')}"  # not in the workspace
    monkeypatch.setenv("RATCHET_STORE_URL", store)
    settings.cache_clear()
    shutil.rmtree(step_folder_of("r", 2))
    assert copying.copy_run("r")
    shutil.rmtree(run_folder("r"))
    assert fetching.fetch(f"{store}/r") == "r"
    step_of(config)
    assert digests("r", 2) == digests("again", 2)


@pytest.mark.full
def test_rates_that_are_not_what_they_were_stop_the_next_step(config: RunConfig) -> None:
    step_of(config)
    made = read_manifest(step_folder_of("r", 0))
    assert made.prompts.pass_rates
    path_of(made.prompts.pass_rates).write_text('{"row_number": 3, "pass_rate": 0.5, "num_judged": 4, "step": 0}\n')
    with pytest.raises(Exception, match=r"pass_rates\.jsonl"):
        step_of(config)
    assert not StepFolder.at("r", 1).manifest.exists()


@pytest.mark.full
def test_the_groups_of_all_draws_are_measured(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config.but(data=config.data.but(max_draws=3), num_steps=2)
    run(config)
    lines = read_json_lines(StepFolder.at("r", 0).draws)
    known = rates_of(read_json_lines(StepFolder.at("r", 1).pass_rates))
    assert known.keys() == {line["row_number"] for line in lines}
    assert {number: rate.pass_rate for number, rate in known.items()} == {line["row_number"]: line["pass_rate"] for line in lines}
    assert {"curriculum/num_measured_rows", "draws/num_draws"} <= read_manifest(step_folder_of("r", 1)).prompts.draw_counts.keys()


@pytest.mark.full
def test_a_step_that_is_killed_after_its_rates_were_written_draws_the_same_rows(config: RunConfig, tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(WAITS_IN_STEP_1)
    trainer = config.trainer.but(mode="per_step")
    settings_of = {"name": f"{reward}:score", "workers": 1, "timeout_s": 900.0, "environment": ["RATCHET_WORKSPACE"]}
    config = config.but(num_steps=2, reward=settings_of, trainer=trainer)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for workspace in (undisturbed, killed):
        workspace.mkdir()
        second = workspace / "runs/r/steps/000001"
        end = str(second / "manifest.json")
        if workspace == killed:
            program = program_with(config, workspace, PROGRAM, end)
            written = [second / "pass_rates.jsonl", second / "samples.parquet"]
            assert becomes(lambda paths=written: all(path.exists() for path in paths), within_s=800)
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            assert not Path(end).exists()
        (workspace / "go").touch()
        assert program_with(config, workspace, PROGRAM, end).wait(timeout=900) == 0, (workspace / "said.log").read_text()[-4000:]
    for name in ("pass_rates.jsonl", "prompts.jsonl"):
        both = [(workspace / "runs/r/steps/000001" / name).read_bytes() for workspace in (undisturbed, killed)]
        assert both[0] == both[1] != b""
