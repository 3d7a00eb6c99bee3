"""Prefect's server, its worker or both are struck at random moments: runs end by themselves or by the same command, and nothing stays Running."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from shared import FIRST_PORT

from infra.settings import CHECKOUT

pytestmark = [pytest.mark.full, pytest.mark.timeout(5400)]


def test_runs_outlive_prefects_server_and_worker(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("prefect_strikes.py"))
    command = [sys.executable, program, "--folder", str(tmp_path), "--port", str(FIRST_PORT + 900)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=5400, check=False)
    print(done.stdout)
    trials = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(trials) == 12, done.stderr[-3000:]
    assert [each for each in trials if not each["struck"] or not each["digests_equal"] or each["left_running"]] == []
    in_shell = [each for each in trials if each["trial"].startswith("shell")]
    assert [each for each in in_shell if not each["by_itself"] or each["tracebacks"]] == []
