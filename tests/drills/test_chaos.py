"""Thirty trials of chaos.py: random parts of real runs, struck at random moments."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from shared import FIRST_PORT

from infra.settings import CHECKOUT

pytestmark = [pytest.mark.full, pytest.mark.end_to_end, pytest.mark.timeout(7200)]


def test_every_run_that_is_struck_at_random_ends_with_the_digests_of_an_undisturbed_one(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), "--trials", "30", "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--port", str(FIRST_PORT + 1000)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=7000,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
    assert "30 of 30 trials passed; left behind: nothing" in done.stdout
