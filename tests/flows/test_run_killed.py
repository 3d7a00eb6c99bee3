"""A whole run that is killed -9 in its second step comes out as the one that nobody disturbed.

The processes that make it have no Prefect server to talk to: each starts one of its own for the time of the call, as
`rl_run(...)` in a script does.
"""

import os
import signal
from pathlib import Path

import pytest
from shared import becomes, program_with

from infra.config import EvaluationConfig, RunConfig
from infra.store.files import read_json

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]  # the drill's sample kills the flow of a step

PROGRAM = """
import pathlib, sys
from flows.run import rl_run
from infra.config import RunConfig
rl_run(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()))
"""


@pytest.fixture
def config(scripted: RunConfig) -> RunConfig:
    return scripted.but(num_steps=2, evaluation=EvaluationConfig(every=1, num_prompts=8))


def finished(config: RunConfig, workspace: Path) -> dict[str, str]:
    """Digests of the adapters, by version; and of the evaluations' answers."""
    running = program_with(config, workspace, PROGRAM)
    assert running.wait(timeout=600) == 0, (workspace / "said.log").read_text()[-4000:]
    run = workspace / "runs/r"
    manifests = [read_json(path) for path in sorted(run.glob("steps/*/manifest.json"))]
    evaluated = [read_json(path)["record"] for path in sorted(run.glob("evaluations/*/evaluation.json"))]
    adapters = {f"adapter {each['adapter_out']['version']}": each["adapter_out"]["weights"]["sha256"] for each in manifests}
    return adapters | {f"evaluation {each['step']}": each["file"]["sha256"] for each in evaluated}


def test_a_run_that_is_killed_comes_out_as_if_nobody_had(config: RunConfig, tmp_path: Path) -> None:
    undisturbed = finished(config, tmp_path / "undisturbed")
    assert list(undisturbed) == ["adapter 1", "adapter 2", "evaluation 0", "evaluation 1", "evaluation 2"]

    killed, workspace = program_with(config, tmp_path / "killed", PROGRAM), tmp_path / "killed"
    assert becomes((workspace / "runs/r/steps/000001/train/job.json").exists, within_s=500), (workspace / "said.log").read_text()
    os.killpg(killed.pid, signal.SIGKILL)  # its server dies with it
    killed.wait()
    assert not (workspace / "runs/r/steps/000001/manifest.json").exists()
    kept = (workspace / "runs/r/steps/000001/samples.parquet").stat().st_mtime_ns

    assert finished(config, workspace) == undisturbed
    assert (workspace / "runs/r/steps/000001/samples.parquet").stat().st_mtime_ns == kept, "sampled again"
