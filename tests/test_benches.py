"""Every benchmark in small: it ends well and prints its figures. What the figures are is not judged here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import FIRST_PORT

from infra.settings import CHECKOUT

BENCHES = CHECKOUT / "tests/benches"
SMALL: dict[str, tuple[list[str], str]] = {
    "curriculum.py": (["--rows", "100", "--steps", "4", "--seeds", "1"], "between 0.1 and 0.9: "),
    "effective_time.py": (["--steps", "4"], '"digests_equal": true'),
    "forecast_points.py": ([], "largest difference: "),
    "gateway.py": (["--sessions", "4", "--turns", "2", "--delay", "0.1", "--repeats", "1"], "s of CPU per 1,000 turns"),
    "house.py": ([], "| files over 350 lines |"),
    "long_tail.py": (["--steps", "3", "--train_s", "0", "--rollout_s", "0.2"], "4 ahead:"),
    "notes.py": (["FOLDER", "--megabytes", "4", "--repeat", "1"], "by an exchange:"),
    "orchestration.py": (["--samples", "16", "--steps", "1"], "| samples a step | 16 |"),
    "partial_rollouts.py": (["--steps", "1"], '"way": "partial rollouts"'),
    "resident_step.py": (["FOLDER", "--megabytes", "4", "--steps", "3"], "medians {"),
    "reward_model_start.py": (["--rollout", "1", "--times", "1"], "ratio "),
    "rewards.py": (["--samples", "64"], "mine.py:numeric: first"),
    "samples.py": (["--samples", "16"], '"prefect_rows":'),
    "simulate.py": (["--prompts", "16", "--repeats", "1"], '"replica_speedup":'),
    "simulated_tables.py": ([], '"effective_training_time":'),
    "step_tail.py": (["--samples", "32", "--repeats", "1"], "32 samples"),
    "under_way.py": (["FOLDER", "--samples", "64", "--copies", "2"], '"sent_over_journal": 1.0'),
    "tensor_file.py": (["FOLDER", "--megabytes", "4", "--repeat", "1"], "safetensors, then the digest:"),
}
"""Arguments of each benchmark, and a part of what it prints."""
HELPERS = {
    "agents.py",
    "answering_server.py",
    "count_turns.py",
    "learning_curves.py",
    "oracle.py",
    "llama_tiny.py",
    "qwen3_tiny.py",
    "learning_picture.py",
    "beside_trl.py",
    "partly_judged.py",
    "process_cpu.py",
    "published_rewards.py",
    "record_arrivals.py",
    "sleeping_server.py",
    "staleness_table.py",
    "router_probe.py",
    "trl_steps.py",
    "verl_steps.py",
}
"""No benchmarks; the learning curves take minutes a run, tests/flows/test_learning_curves.py has their figures; tests/test_count_turns.py
counts; tests/test_oracle.py runs the oracle; published_rewards.py needs checkouts of TRL and verl; record_arrivals.py reads a run;
partly_judged.py holds rewards, for runs; router_probe.py needs smg;
TRL needs an environment of its own, tests/test_beside_trl.py has the parts that do without."""


def test_every_benchmark_has_a_small_form() -> None:
    assert {path.name for path in BENCHES.glob("*.py")} - HELPERS == SMALL.keys()


@pytest.mark.full
@pytest.mark.end_to_end
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_in_small(name: str, tmp_path: Path) -> None:
    arguments, expected = SMALL[name]
    ports = {
        "RATCHET_PREFECT_PORT": str(FIRST_PORT),
        "RATCHET_MLFLOW_PORT": str(FIRST_PORT + 200),
        "RATCHET_ENGINE_PORT": str(FIRST_PORT + 400),
    }
    done = subprocess.run(
        [sys.executable, str(BENCHES / name), *(word.replace("FOLDER", str(tmp_path)) for word in arguments)],
        cwd=CHECKOUT,
        env=os.environ | ports | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert expected in done.stdout
