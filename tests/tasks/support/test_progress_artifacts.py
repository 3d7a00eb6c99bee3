"""Progress artifacts: few, right, and never in the way."""

import logging
import time
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.progress import work as progress
from infra.progress.work import Work
from tasks.support import prefect_calls, progress_artifacts

UPDATES = list[tuple[float, str]]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> UPDATES:
    """What reaches the API, which is not there."""
    seen: UPDATES = []

    def create(progress: float, key: str, description: str) -> UUID:
        seen.append((progress, description))
        return uuid4()

    monkeypatch.setattr(progress_artifacts, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress_artifacts, "create_progress_artifact", create)
    monkeypatch.setattr(
        progress_artifacts, "update_progress_artifact", lambda _, progress, description: seen.append((progress, description))
    )
    return seen


@pytest.mark.parametrize("num_samples", [64, 4096])
def test_the_number_of_updates_does_not_grow_with_the_samples(num_samples: int, updates: UPDATES) -> None:
    work = Work("rollout", num_samples, "samples")
    page = progress_artifacts.Page(work, key="k")
    for _ in range(num_samples):
        page.look()
        work.done += 1
    page.is_over = True
    page.look()
    assert progress_artifacts.NUM_UPDATES - 1 <= len(updates) <= progress_artifacts.NUM_UPDATES + 2
    assert updates[-2][0] > 80, "all updates were used up at the beginning"
    assert updates[0][0] == 0 and updates[-1] == (100, "rollout: done")


def test_work_that_goes_to_and_fro_for_ever_has_no_more_updates(updates: UPDATES) -> None:
    work = Work("training", 2)
    page = progress_artifacts.Page(work, key="k")
    for number in range(1000):
        work.done = number % 2
        page.look()
    assert len(updates) <= progress_artifacts.NUM_UPDATES + 2


def test_an_api_that_is_away_costs_one_log_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def away(*_: object, **__: object) -> UUID:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(progress_artifacts, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress_artifacts, "create_progress_artifact", away)
    page = progress_artifacts.Page(Work("rollout", 10), key="k")
    for _ in range(5):
        page.look()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "no more progress of rollout on its page: ConnectError: no route"
    ]


def test_work_that_is_soon_over_has_no_artifact(updates: UPDATES, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_artifacts, "SHOWN_AFTER_S", 60.0)
    page = progress_artifacts.Page(Work("rollout", 10), key="k")
    page.look()
    page.is_over = True
    page.look()
    assert updates == []


def test_progress_does_not_wait_for_an_api_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_artifacts, "SHOWN_AFTER_S", 0.0)
    page = progress_artifacts.Page(Work("rollout", 10), key="k")
    begun = time.monotonic()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        page.look()
    assert page.is_off and time.monotonic() - begun < prefect_calls.WAIT_S / 2


def test_keys_are_as_prefect_wants_them() -> None:
    assert progress_artifacts.key_of("My_run.2", "loading weights") == "my-run-2-loading-weights"


@pytest.mark.usefixtures("prefect_server")
def test_a_task_has_its_progress_on_its_page_and_fails_for_its_own_reasons_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @task
    def roll_out() -> str:
        with progress.work("rollout", 4, "samples") as work:
            work.done = 4
        return "made"

    @flow(name="watched-flow", flow_run_name="watched")
    def whole() -> str:
        with progress_artifacts.progress_artifacts():
            return roll_out()

    monkeypatch.setattr(progress_artifacts, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "JOIN_S", 60.0)  # the last call takes longer than 2 s on a busy machine
    assert whole() == "made"
    with get_client(sync_client=True) as client:
        [made] = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["watched-rollout"])))
    assert (made.type, made.data, made.description) == ("progress", 100.0, "rollout: done")
    assert made.task_run_id is not None and made.flow_run_id is not None

    def away(*_: object, **__: object) -> UUID:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(progress_artifacts, "create_progress_artifact", away)
    assert whole() == "made"
    assert "no more progress of rollout on its page" in caplog.text
