"""The tests of left_behind.py, in a process without threads of other tests: what those allocate would be counted as a job's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(900)
def test_a_job_leaves_nothing_behind_in_a_process_of_its_own() -> None:
    cases = Path(__file__).with_name("left_behind.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout[-5000:] + done.stderr[-1000:]
