"""What a whole run leaves for those who watch it: a real trainer, a scripted engine, a Prefect server."""

import xml.etree.ElementTree as ET
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact

from flows.run import rl_run
from flows.step import rl_step
from infra.config import EvaluationConfig, RunConfig
from infra.settings import settings
from infra.store.files import read_json
from infra.store.layout import run_folder
from tasks.support import progress_artifacts

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_artifacts, "SHOWN_AFTER_S", 0.0)


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    return scripted.but(name="w", num_steps=1, evaluation=EvaluationConfig(every=1, num_prompts=8))


def artifacts(*keys: str) -> dict[str, Artifact]:
    """The latest of each key; the server has those of other tests too, more than it tells at once."""
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=list(keys)))
    with get_client(sync_client=True) as client:
        found = sorted(client.read_artifacts(artifact_filter=wanted), key=lambda artifact: str(artifact.created))
    return {artifact.key: artifact for artifact in found if artifact.key}


def test_a_run_leaves_reports_pictures_and_progress_on_its_pages_and_on_the_disk(config: RunConfig) -> None:
    rl_run.with_options(result_storage=settings().results)(config)
    step, summary = run_folder("w") / "steps/000000", run_folder("w") / "summary"
    report = (step / "report.md").read_text()
    assert "| reward | **" in report and "Last evaluation: adapter version 0, pass@1" in report
    picture = (step / "timeline.svg").read_text()
    ET.fromstring(picture)
    assert all(f"<title>{name} " in picture for name in ("roll_out", "train", "export", "score", "assemble"))
    rows = read_json(step / "machine_load.json")
    assert rows and any("system/trainer_memory_megabytes" in row for row in rows)
    assert "| 1 | **" in (summary / "report.md").read_text()
    ET.fromstring((summary / "curves.svg").read_text())
    shown = artifacts("w-000000", "w-report", "w-eval-000001", "w-rollout", "w-training")
    assert "pass@1" in (shown["w-eval-000001"].description or "")
    for key in ("w-000000", "w-report"):
        assert shown[key].type == "markdown" and "](data:image/svg+xml;base64," in str(shown[key].data)
    for key, what in (("w-rollout", "rollout: done"), ("w-training", "training: done")):
        assert (shown[key].type, shown[key].data, shown[key].description) == ("progress", 100.0, what)


def test_a_step_is_made_all_the_same_while_progress_cannot_be_told(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object, **__: object) -> UUID:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(progress_artifacts, "create_progress_artifact", away)
    made = rl_step.with_options(result_storage=settings().results)(config.but(name="away"))
    assert made.adapter.version == 1
    assert "no more progress of rollout on its page: ConnectError: no route" in caplog.text
