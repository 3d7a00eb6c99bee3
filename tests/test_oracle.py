"""A run of episodes by the real SGLang and the real trainer, recomputed from its files by tests/benches/oracle.py, which uses none of our code."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from flows.presets import calculator
from flows.run import rl_run
from infra.config import EvaluationConfig
from infra.engines.server import server_process
from infra.models import base_model
from infra.settings import settings
from infra.store.layout import run_folder
from infra.trainers import resident

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(900)]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def tiny() -> Path:
    settings.cache_clear()
    return base_model.locate("tiny")


@pytest.fixture
def ends_programs(workspace: Path) -> Iterator[None]:
    yield
    server_process.stop_recorded()
    resident.stop_recorded()


def oracle() -> ModuleType:
    path = Path(__file__).parent / "benches/oracle.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("prefect_server", "ends_programs")
def test_transformers_and_peft_come_to_the_same_log_probabilities_and_updates(tiny: Path) -> None:
    base = calculator()
    config = base.but(
        name="r",
        model=str(tiny),
        num_steps=NUM_STEPS,
        data=base.data.but(num_prompts=6),
        evaluation=EvaluationConfig(every=0),
    )
    rl_run.with_options(result_storage=settings().results)(config)
    found = list(oracle().steps(run_folder("r"), tiny, NUM_STEPS))
    assert len(found) == NUM_STEPS
    for figures in found:
        print(figures)
        assert figures["max_logprob_diff"] < 1e-3
        assert figures["update_error"] < 1e-3
        assert figures["update_error_of_others"] < 1e-5
    assert all(figures["grad_norm"] > 0 and figures["num_tokens"] > 100 for figures in found)
