"""Names and tags of flow runs, in a terminal and in a worker."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.flow_engine import run_flow
from prefect.logging.handlers import set_api_log_sink

from flows.presets import smoke
from infra.progress.brief import brief
from infra.reporting import names
from tasks.support.flow_runs import made_from, note_flow_run

log = logging.getLogger("infra.test_flow_runs")
pytestmark = pytest.mark.usefixtures("prefect_server", "workspace")
OF_CONFIG = {"model:tiny", "algorithm:grpo+ppo"}


@flow(name="noted-step")
def inner(run: str) -> None:
    note_flow_run(names.step_name(run, 13), smoke())
    brief.info("step 13/20")
    log.info("a detail")


@flow(name="noted-run")
def outer(run: str) -> None:
    note_flow_run(run, smoke())
    inner(run)


@flow(name="noted-form")
def from_form(run: str, preset: str = "auto") -> None:
    note_flow_run(run, smoke())
    inner(run)


def tags_of(run: str) -> dict[str, set[str]]:
    """The tags of the run's flow runs, by their names without the run's."""
    wanted = FlowRunFilter(name=FlowRunFilterName(like_=run))
    with get_client(sync_client=True) as client:
        return {found.name.removeprefix(run): set(found.tags) for found in client.read_flow_runs(flow_run_filter=wanted)}


def test_a_flow_run_in_a_terminal_and_those_inside_it_have_the_preset_of_the_command() -> None:
    with made_from("arithmetic"):
        outer("terminal")
    assert tags_of("terminal") == dict.fromkeys(("", "/000013"), OF_CONFIG | {"preset:arithmetic"})


def test_a_flow_run_of_a_worker_has_the_tags_of_its_deployment_and_those_inside_it_the_preset() -> None:
    with get_client(sync_client=True) as client:
        made = client.create_flow_run(outer, parameters={"run": "worker"}, tags=["rl-run", "preset:smoke"])
    with made_from(None):
        run_flow(outer, flow_run=made, parameters={"run": "worker"})
    assert tags_of("worker") == {"": OF_CONFIG | {"preset:smoke", "rl-run"}, "/000013": OF_CONFIG | {"preset:smoke"}}


def test_the_preset_of_a_form_is_a_tag() -> None:
    with made_from(None):
        from_form("form", "smoke")
        from_form("auto")
    assert tags_of("form") == dict.fromkeys(("", "/000013"), OF_CONFIG | {"preset:smoke"})
    assert tags_of("auto") == dict.fromkeys(("", "/000013"), OF_CONFIG)


def test_a_brief_line_is_on_the_page_of_its_flow_run_and_of_the_whole_run_and_a_detail_on_one() -> None:
    sent: list[dict[str, Any]] = []
    log.setLevel(logging.INFO)
    brief.setLevel(logging.INFO)
    set_api_log_sink(sent.append)
    try:
        outer("paged")
        brief.info("of no flow run")
    finally:
        set_api_log_sink(None)
    pages = {text: {line["flow_run_id"] for line in sent if line["message"] == text} for text in ("step 13/20", "a detail")}
    assert len(pages["step 13/20"]) == 2 and len(pages["a detail"]) == 1 and pages["a detail"] < pages["step 13/20"]
    assert not [line for line in sent if line["message"] == "of no flow run"]


def test_a_file_of_its_own_has_no_preset() -> None:
    with made_from(None):
        outer("file")
    assert tags_of("file") == dict.fromkeys(("", "/000013"), OF_CONFIG)


def test_names_say_the_run_and_what_it_made(tmp_path: Path) -> None:
    assert names.step_name("mine", 13) == "mine/000013"
    assert names.evaluation_name("mine", 10) == "mine/eval/000010"
    assert names.evaluation_name("mine", str(tmp_path / "other")) == "mine/eval/other"
    assert names.replay_name("again", 3, "mine") == "again/000003 replays mine"
