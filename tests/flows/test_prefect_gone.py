"""A Prefect server that was started elsewhere and is gone: the run says so, ends with an error that names it, and the same command goes on later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import becomes

from infra.config import RunConfig
from infra.processes import children
from infra.services import prefect_password, servers
from infra.settings import CHECKOUT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PROGRAM = """
from flows.cli import app
from tasks.support import prefect_calls
prefect_calls.WAIT_S = 20.0
app.main()
"""


def started(workspace: Path, config: RunConfig, api_url: str) -> "subprocess.Popen[bytes]":
    fields = {"model": config.model, "engine.kind": "scripted", "trainer.max_mismatch": "null", "evaluation.every": 0}
    fields |= {"data.num_prompts": 4, "sampling.group_size": 4, "num_steps": 3}
    words = [f"--{field}={value}" for field, value in fields.items()]
    environment = os.environ | prefect_password.client_environment(api_url) | {"RATCHET_WORKSPACE": str(workspace)}
    with (workspace / "said.log").open("wb") as log:
        command = [sys.executable, "-c", PROGRAM, "run", "--preset", "smoke", "--name", "gone", *words]
        return subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log, start_new_session=True)


def test_a_run_ends_and_goes_on_when_the_server_is_back(own_prefect: str, scripted: RunConfig, tmp_path: Path) -> None:
    running = started(tmp_path, scripted, own_prefect)
    assert becomes((tmp_path / "runs/gone/steps/000000/manifest.json").exists, within_s=240)
    server = servers.living(servers.PREFECT)
    assert server is not None
    children.stop(server.process, grace_s=0)
    assert running.wait(240) == 1
    said = (tmp_path / "said.log").read_text()
    assert f"\nerror: Prefect's server at {own_prefect} did not answer for 20 s" in said, said[-3000:]
    assert "it was not started here, so the run ends after 20 s" in said
    committed = sorted((tmp_path / "runs/gone").glob("steps/*/manifest.json"))
    kept = {path: path.stat().st_mtime_ns for path in committed}
    servers.revive_prefect(own_prefect, 1000.0)
    assert started(tmp_path, scripted, own_prefect).wait(400) == 0
    assert {path: path.stat().st_mtime_ns for path in committed} == kept
    assert len(list((tmp_path / "runs/gone").glob("steps/*/manifest.json"))) == 3
