from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import FIRST_PORT

from flows.presets import smoke
from infra.config import RunConfig
from infra.engines.scripted import ScriptedEngine
from infra.services import servers
from infra.settings import settings
from infra.tracking import upload
from infra.trainers import resident


@pytest.fixture(scope="module")
def own_prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prefect server that we started, without a worker, to which prefect.yaml is deployed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_WORKSPACE", str(tmp_path_factory.mktemp("own-prefect")))
        patch.setenv("RATCHET_PREFECT_PORT", str(FIRST_PORT + 60))
        patch.delenv("PREFECT_API_URL", raising=False)
        settings.cache_clear()
        try:
            api_url = servers.ensure_prefect()
            servers.deploy(api_url)
            yield api_url
        finally:
            servers.stop_all()
            settings.cache_clear()


@pytest.fixture(scope="session")
def model(random_tiny: Path) -> Path:
    return random_tiny


@pytest.fixture(scope="session")
def scripted(model: Path) -> RunConfig:
    """The preset smoke with a scripted engine and few samples."""
    base = smoke()
    return base.but(
        name="r",
        model=str(model),
        data=base.data.but(num_prompts=4),
        engine=base.engine.but(kind="scripted"),
        # The engine knows nothing of the model; a trainer that stays up would outlive tests that do not end it.
        trainer=base.trainer.but(max_mismatch=None, mode="per_step"),
        sampling=base.sampling.but(group_size=4),
    )


@pytest.fixture
def no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of this process leave their files to a later upload, whose process costs 4 CPU s in each new workspace and holds the first step up."""
    monkeypatch.setattr(upload, "start", lambda: None)
    monkeypatch.setattr(upload, "start_upload", lambda run: None)


@pytest.fixture
def ends_programs(workspace: Path, no_upload: None) -> Iterator[None]:
    """What a test has started ends with it, and no upload is started."""
    yield
    ScriptedEngine.stop_in(workspace)
    resident.stop_recorded()
