"""What a run in a terminal prints, and what Prefect's pages have of it: a scripted engine, the real trainer, a Prefect server."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL
from shared import FIRST_PORT, RATCHET

from infra.config import RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.settings import CHECKOUT, settings
from infra.store.files import write_json
from infra.store.layout import run_folder
from infra.trainers import resident

NAME = "lines"
NUM_STEPS = 2
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def config_file(scripted: RunConfig, prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lines")
    config = scripted.but(
        name=NAME,
        num_steps=NUM_STEPS,
        evaluation=scripted.evaluation.but(every=1, num_prompts=4),
        trainer=scripted.trainer.but(mode="persistent"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_WORKSPACE", str(folder))
        patch.setenv("PREFECT_API_URL", PREFECT_API_URL.value() or "")
        patch.setenv("COLUMNS", "150")
        patch.setenv("RATCHET_MLFLOW_PORT", str(FIRST_PORT + 290))
        settings.cache_clear()
        yield str(write_json(folder / "mine.json", config.model_dump(mode="json")))
        ScriptedEngine.stop_in(folder)
        resident.stop_recorded()
        settings.cache_clear()


@pytest.fixture(scope="module")
def printed(config_file: str) -> list[str]:
    """The lines of the first run, of two steps and three evaluations."""
    return ratchet("run", "--config", config_file)


def ratchet(*words: str) -> list[str]:
    environment = dict(os.environ)
    done = subprocess.run(
        [*RATCHET, *words], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.strip()]


def longer(config_file: str, num_steps: int, *options: str) -> list[str]:
    """The lines of the same run, made one step longer."""
    return ratchet("run", "--config", config_file, "--num_steps", str(num_steps), *options)


def beginning(line: str) -> str:
    return " ".join(line.split()[1:3])


def test_a_run_prints_a_line_a_step_and_one_for_each_evaluation(printed: list[str]) -> None:
    logged = [line for line in printed if re.match(r"\d\d:\d\d:\d\d ", line)]
    lines = [line for line in logged if beginning(line) in ("step 0/2", "step 1/2", "eval of")]
    assert [beginning(line) for line in lines] == ["eval of", "step 0/2", "eval of", "step 1/2", "eval of"]
    step = r"\S+ step 1/2  reward [\d.]+ \([+-][\d.]+\)  pass@1 [\d.]+  [\d.]+ s  rollout [\d.]+ s  train [\d.]+ s  tokens [\d,]+"
    assert re.match(step, lines[3])
    assert len(printed) <= 5 + 35, "a run of 20 steps would print more than 60 lines"
    text = "\n".join(printed)
    for other in ("Finished in state", "Beginning flow run", "View at", "trainer: ", "micro-batch", "scripted: "):
        assert other not in text


def test_the_end_has_the_figures_in_the_order_of_the_questions_with_links_and_the_next_command(printed: list[str]) -> None:
    end = printed[
        next(number for number, line in enumerate(printed) if line.startswith(f"run {NAME}: 2 steps, all steps made")) :
    ]
    asked = ("reward", "pass@1, last", "groups that", "gradient norm", "entropy", "tokens a", "time of", "engine vs", "warnings")
    found = [next((n for n, line in enumerate(end) if line.startswith(label)), -1) for label in asked]
    assert -1 not in found and found == sorted(found), end
    (page,) = (line.split()[1] for line in end if line.startswith("Prefect  "))
    assert re.search(r"/flow-run/[-0-9a-f]{36}$", page)
    assert any(line.startswith(f"next     ratchet show {NAME}") for line in end)
    assert not any("memory/" in line or "time/train_" in line for line in end)


def flow_runs() -> dict[str, FlowRun]:
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=["algorithm:grpo+ppo"]))
    with get_client(sync_client=True) as client:
        return {run.name: run for run in client.read_flow_runs(flow_run_filter=wanted) if run.name.startswith(NAME)}


def logs_of(run: FlowRun) -> list[Any]:
    with get_client(sync_client=True) as client:
        return client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))


def test_flow_runs_have_names_tags_and_the_lines_of_the_terminal(printed: list[str]) -> None:
    found = flow_runs()
    steps, evaluations = [f"{NAME}/{n:06d}" for n in range(2)], [f"{NAME}/eval/{n:06d}" for n in range(3)]
    assert {NAME, *steps, *evaluations} <= set(found)
    assert all("model:random-tiny" in run.tags for run in found.values())
    for name in (steps[1], evaluations[0]):
        lines = logs_of(found[name])
        assert {line.name.partition(".")[0] for line in lines} >= {"infra"}, name
        assert min(line.level for line in lines) >= 20
    assert [line.message for line in logs_of(found[steps[1]]) if line.message.startswith("step 1/2  reward ")]
    assert any(line.name.startswith("tasks.") for line in logs_of(found[steps[1]]))
    of_run = [line.message for line in logs_of(found[NAME])]
    assert sum(message.startswith(("step ", "eval of ")) for message in of_run) == 5, "the run's own page has them too"


def test_quiet_prints_the_result_only(printed: list[str], config_file: str) -> None:
    lines = longer(config_file, NUM_STEPS + 1, "-q")
    assert lines[0].startswith(f"run {NAME}: 3 steps, all steps made")
    assert not [line for line in lines if re.match(r"\d\d:\d\d:\d\d (?!warning)", line)]


def test_log_json_is_an_object_a_line(printed: list[str], config_file: str) -> None:
    found = [json.loads(line) for line in longer(config_file, NUM_STEPS + 2, "--log-json")]
    assert all(set(line) == {"time", "level", "logger", "message"} for line in found)
    (step,) = [line for line in found if line["message"].startswith("step 3/4  reward ")]
    assert (step["level"], step["logger"]) == ("info", "infra.progress.brief")
    assert any(line["message"].startswith(f"run {NAME}: 4 steps, all steps made") for line in found)


def test_verbose_has_the_details_of_the_tasks_and_the_whole_configuration(printed: list[str], config_file: str) -> None:
    text = "\n".join(longer(config_file, NUM_STEPS + 3, "--verbose"))
    assert "step 4/5  reward " in text and "step 4 of run lines is committed" in text and "trainer.lora.rank" in text
    assert "Finished in state" not in text


def test_the_runs_own_page_lists_its_reports_and_follows_the_same_questions(printed: list[str]) -> None:
    page = (run_folder(NAME) / "summary/report.md").read_text()
    assert re.search(r"\* \[lines/000001\]\(http\S+/flow-run/\S+\): reward ", page)
    assert re.search(r"\* \[lines/eval/000002\]\(http\S+/flow-run/\S+\): pass@1 ", page)
    questions = page.partition("## The same questions over the evaluations")[2].partition("\n## ")[0]
    assert questions.count("**Question**") == 3 and questions.count("adapter 0, reward") == 3
