"""A whole sweep in this process: a real trainer, a scripted engine, and a model with random weights."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State

import flows.sweep
from flows.sweep import rl_sweep
from infra.config import EvaluationConfig, ExportConfig, RunConfig
from infra.engines.interface import SampleRequest
from infra.engines.scripted import ScriptedEngine
from infra.eval_records import RunReport
from infra.records import AdapterVersion
from infra.settings import CHECKOUT, settings
from infra.store.files import read_json
from infra.store.layout import run_folder
from infra.tracking import tables

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(900)]
NUM_SAMPLES = 4 * 4
OVER = ["trainer.learning_rate=1e-4,1e-3"]
SLOW, FAST = "s-learning_rate-0.0001", "s-learning_rate-0.001"


@pytest.fixture
def config(scripted: RunConfig, ends_programs: None) -> RunConfig:
    return scripted.but(
        name="s",
        num_steps=2,
        trainer=scripted.trainer.but(mode="persistent"),
        evaluation=EvaluationConfig(every=0),
        export=ExportConfig(what="nothing"),
    )


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Samples that the engine has generated, by the version of the adapter."""
    found: Counter[int] = Counter()
    sample = ScriptedEngine.sample

    def counting(
        self: ScriptedEngine, missing: Sequence[SampleRequest], sampling: Any, adapter: AdapterVersion, *given: Any, **how: Any
    ) -> Any:
        found[adapter.version] += len(missing)
        return sample(self, missing, sampling, adapter, *given, **how)

    monkeypatch.setattr(ScriptedEngine, "sample", counting)
    return found


def swept(config: RunConfig, over: list[str]) -> State[list[RunReport]]:
    return rl_sweep.with_options(result_storage=settings().results)(config, over, return_state=True)


def manifest(run: str, step: int) -> Any:
    return read_json(run_folder(run) / f"steps/{step:06d}/manifest.json")


def test_variants_share_the_rollouts_of_step_0_and_are_compared_by_their_sweep(config: RunConfig, sampled: Counter[int]) -> None:
    made = swept(config, OVER).result()
    assert [(report.run, report.num_steps) for report in made] == [(SLOW, 2), (FAST, 2)]
    assert sampled == {0: NUM_SAMPLES, 1: 2 * NUM_SAMPLES}, "step 0 was sampled again"
    first, second = manifest(SLOW, 0), manifest(FAST, 0)
    assert first["rollouts"]["file"]["sha256"] == second["rollouts"]["file"]["sha256"]
    assert first["adapter_out"]["weights"]["sha256"] != second["adapter_out"]["weights"]["sha256"]
    assert (second["replayed_from"]["run"], second["replayed_from"]["from_task"]) == (SLOW, "train")
    assert second["config"]["trainer"]["learning_rate"] == 1e-3

    again = swept(config, OVER).result()
    assert again == made and sampled.total() == 3 * NUM_SAMPLES, "a finished variant was made again"
    longer = swept(config.but(num_steps=3), OVER).result()
    assert [report.num_steps for report in longer] == [3, 3] and sampled[0] == NUM_SAMPLES

    subprocess.run([sys.executable, "-m", "infra.tracking.upload"], cwd=CHECKOUT, check=True)
    runs = tables.recorded_runs(tags={"ratchet.sweep": "s"})
    assert {run.name for run in runs} == {SLOW, FAST}
    assert list(tables.config_diff(runs).index) == ["trainer.learning_rate"]


def test_a_variant_that_fails_does_not_end_the_sweep_and_is_named(config: RunConfig, sampled: Counter[int]) -> None:
    short = config.but(num_steps=1)
    failed = swept(short, ["trainer.timeout_s=0.05,600"])
    assert failed.is_failed()
    assert "1 of 2 variants are not finished" in (failed.message or "") and "s-timeout_s-0.05: " in (failed.message or "")
    assert (run_folder("s-timeout_s-600") / "steps/000000/manifest.json").exists()


@pytest.mark.full  # its sample is the variant that fails
def test_a_variant_that_was_killed_before_its_first_evaluation_makes_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = config.but(num_steps=1, evaluation=EvaluationConfig(every=1, num_prompts=2, num_samples=1, pass_at_k=(1,)))

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(flows.sweep, "evaluate", killed)
        assert "killed" in (swept(examined, OVER).message or "")
    assert (run_folder(FAST) / "steps/000000/manifest.json").exists()
    made = swept(examined, OVER).result()
    assert [[each.step for each in report.evaluations] for report in made] == [[0, 1], [0, 1]]


def test_bad_input_is_said_before_anything_is_begun(config: RunConfig, workspace: Path) -> None:
    refused = swept(config, ["trainer.learning_rate=1e-4,-1"])
    assert refused.is_failed() and "trainer.learning_rate = -1" in (refused.message or "")
    assert not (workspace / "runs").exists()
