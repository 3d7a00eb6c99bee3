"""The Slurm script that joins nodes by Ray, with stand-ins for the commands of Slurm and for what it starts; they write down how they were called."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infra.settings import CHECKOUT

SCRIPT = CHECKOUT / "infra/setup/templates/slurm-ray.sbatch"
SCONTROL = "#!/bin/sh\n[ \"$1 $2\" = 'show hostnames' ] && echo \"$3\" | tr ',' '\\n'\n"
SRUN = """#!{python}
import json, os, pathlib, signal, stat, sys, time
node = next(word for word in sys.argv if word.startswith("--nodelist=")).partition("=")[2]
command = [word for word in sys.argv[1:] if not word.startswith("--")] if "hostname" in sys.argv else sys.argv[5:]
if command[0] == "hostname":
    print("10.0.0.1 172.17.0.1 ")
    sys.exit()
name = pathlib.Path(command[0]).name + "-" + node
environment = {{name: value for name, value in os.environ.items() if name.startswith(("RATCHET_", "RAY_", "PREFECT_"))}}
token = pathlib.Path(environment["RAY_AUTH_TOKEN_PATH"])
called = dict(flags=sys.argv[1:5], argv=command, environment=environment, token=[oct(stat.S_IMODE(token.stat().st_mode)), len(token.read_text())])
folder = pathlib.Path({folder!r})
def write(path, content):
    path.with_suffix(".partial").write_text(content)
    path.with_suffix(".partial").rename(path)
def end(*_):
    with (folder / "ends").open("a") as stream: stream.write(name + "\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
write(folder / name, json.dumps(called))
if command[0].endswith("ray"):
    if {fails!r} == node: sys.exit("no port is free")
    print("Ray runtime started", flush=True)
    time.sleep(120)
if {stays}: time.sleep(120)
sys.exit(7)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("python", "ray", "ratchet"):
        (folder / ".venv/bin" / name).symlink_to(sys.executable)
    return folder


def allocated(
    tmp_path: Path,
    checkout: Path,
    *command: str,
    nodes: str = "gpu1,gpu2,gpu5",
    stays: bool = False,
    fails: str = "",
    **changes: str,
) -> "subprocess.Popen[str]":
    """The script in an allocation of these nodes."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    srun = SRUN.format(python=sys.executable, folder=str(tmp_path), stays=stays, fails=fails)
    for name, content in (("scontrol", SCONTROL), ("srun", srun)):
        (bin_folder / name).write_text(content)
        (bin_folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "RAY_", "PREFECT_"))}
    environment |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": nodes, "RATCHET_WORKSPACE": str(tmp_path / "w")}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *command], env=environment | changes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def called(tmp_path: Path, name: str) -> dict[str, Any]:
    found = json.loads((tmp_path / name).read_text())
    assert isinstance(found, dict)
    return found


def test_ray_joins_all_nodes_and_the_command_runs_on_the_first(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, "run", "--preset", "gsm8k", "--name", "two words")
    output = script.communicate(timeout=60)
    assert script.returncode == 7, output  # that of the command
    head, last, command = (called(tmp_path, name) for name in ("ray-gpu1", "ray-gpu5", "ratchet-gpu1"))
    assert head["flags"] == ["--overlap", "--nodes=1", "--ntasks=1", "--nodelist=gpu1"], "steps of one node share its GPUs"
    assert " ".join(head["argv"]) == (
        ".venv/bin/ray start --block --disable-usage-stats --head --node-ip-address=10.0.0.1 --port=6379 --include-dashboard=false"
    )
    assert last["argv"][-1] == "--address=10.0.0.1:6379"
    assert command["argv"] == [".venv/bin/ratchet", "run", "--preset", "gsm8k", "--name", "two words"]
    environment = command["environment"]
    assert (environment["RATCHET_CLUSTER_ADDRESS"], environment["RATCHET_CLUSTER_NODES"]) == ("10.0.0.1:6379", "3")
    assert environment["RATCHET_LOCK_FOLDER"] == "/tmp/ratchet-7"


def test_without_a_command_a_worker_of_our_pool_runs_on_the_first(tmp_path: Path, checkout: Path) -> None:
    allocated(tmp_path, checkout, PREFECT_API_URL="http://head:4200/api").communicate(timeout=60)
    worker = called(tmp_path, "python-gpu1")
    assert " ".join(worker["argv"]) == (
        ".venv/bin/python -m prefect worker start --pool ratchet --type process --limit 1 --name slurm-7"
    )
    environment = worker["environment"]
    assert environment["RATCHET_CLUSTER_NODES"] == "3"
    assert environment["PREFECT_LOCAL_STORAGE_PATH"] == f"{tmp_path}/w/results"


def test_all_nodes_share_a_token_that_nobody_else_can_read_and_that_is_gone_at_the_end(tmp_path: Path, checkout: Path) -> None:
    allocated(tmp_path, checkout, "run").communicate(timeout=60)
    for name in ("ray-gpu1", "ray-gpu2", "ray-gpu5", "ratchet-gpu1"):
        start = called(tmp_path, name)
        assert start["environment"]["RAY_memory_monitor_refresh_ms"] == "0"
        assert start["environment"]["RAY_AUTH_MODE"] == "token" and start["token"] == ["0o600", 32]
    assert not list((tmp_path / "w").glob("*.token"))
    assert len((tmp_path / "ends").read_text().splitlines()) == 3, "Ray is ended on all nodes"


def test_the_signal_before_the_end_of_the_allocation_ends_the_command_and_then_ray(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, "run", nodes="gpu1,gpu2", stays=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ratchet-gpu1").exists():
        assert time.monotonic() < deadline and script.poll() is None, "the command never began"
        time.sleep(0.05)
    script.terminate()
    output = script.communicate(timeout=60)
    assert script.returncode == 143, output
    ends = (tmp_path / "ends").read_text().splitlines()
    assert ends[0] == "ratchet-gpu1" and sorted(ends[1:]) == ["ray-gpu1", "ray-gpu2"]


def test_a_node_on_which_ray_does_not_start_is_named_and_no_command_is_given(tmp_path: Path, checkout: Path) -> None:
    script = allocated(tmp_path, checkout, "run", fails="gpu2")
    _, said = script.communicate(timeout=60)
    assert script.returncode == 1 and f"error: Ray did not start on gpu2: see {tmp_path}/w/logs/ray-7-1.log" in said
    assert not (tmp_path / "ratchet-gpu1").exists() and not list((tmp_path / "w").glob("*.token"))


def test_what_is_missing_is_said_before_anything_is_started(tmp_path: Path, checkout: Path) -> None:
    (checkout / ".venv/bin/ray").unlink()
    for command, changes, expected in (
        ((), {}, "PREFECT_API_URL: give a command of ratchet after the script"),
        (("run",), {"RATCHET_WORKSPACE": ""}, "RATCHET_WORKSPACE: set it to a folder that all nodes share"),
        (("run",), {}, "/.venv has no Ray: run python3 infra/setup/bootstrap.py --ray there"),
    ):
        script = allocated(tmp_path, checkout, *command, **changes)
        _, said = script.communicate(timeout=60)
        assert script.returncode != 0 and expected in said
        for made in (tmp_path / "bin").iterdir():
            made.unlink()
        (tmp_path / "bin").rmdir()
    assert not (tmp_path / "w").exists()
