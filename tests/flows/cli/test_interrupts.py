"""Ctrl-C, SIGTERM and a closed terminal: one line, exit code 128 and the signal's number, no traceback, at whatever moment they come."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prefect.settings import PREFECT_API_URL
from shared import FIRST_PORT, RATCHET, becomes

from flows.cli import app
from flows.cli.services import stop
from infra.config import RunConfig
from infra.processes import children
from infra.processes.gpu_lock import Holder
from infra.runs import run_state
from infra.services import prefect_api, servers
from infra.settings import CHECKOUT, settings


def command(workspace: Path, *arguments: str, program: Sequence[str] = RATCHET, **environment: str) -> "subprocess.Popen[str]":
    known = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    own = {"RATCHET_WORKSPACE": str(workspace), "RATCHET_MLFLOW_PORT": str(FIRST_PORT + 280)}
    return subprocess.Popen(
        [*program, *arguments],
        cwd=CHECKOUT,
        env=known | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(
            signal.signal, signal.SIGHUP, signal.SIG_DFL
        ),  # which tests that run under nohup would pass on as ignored
    )


def said_after(number: int, running: "subprocess.Popen[str]", when: Callable[[], bool]) -> str:
    """The last line of the output; the signal comes when the moment is there."""
    assert becomes(when, within_s=240), running.communicate(timeout=1)
    running.send_signal(number)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 128 + number, output
    assert "Traceback" not in output and "KeyboardInterrupt" not in output and "Crash detected" not in output
    lines = [line for line in output.splitlines() if line.startswith("interrupted")]
    assert len(lines) == 1 and output.splitlines()[-1] == lines[0], output
    return lines[0]


def options(config: RunConfig) -> list[str]:
    fields = {"model": config.model, "engine.kind": "scripted", "trainer.max_mismatch": "null", "evaluation.every": 0}
    fields |= {"data.num_prompts": 4, "sampling.group_size": 4}
    return [f"--{field}={value}" for field, value in fields.items()]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("run", signal.SIGINT),
        ("run", signal.SIGTERM),
        ("run", signal.SIGHUP),
        ("quickstart", signal.SIGINT),
        ("compare-engines", signal.SIGINT),
    ],
)
def test_while_modules_are_imported(tmp_path: Path, name: str, number: int) -> None:
    (tmp_path / "prefect.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n")
    running = command(tmp_path, name, PYTHONPATH=str(tmp_path))
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output.strip()) == (128 + number, "interrupted before anything was started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_comes_twice_as_of_timeout_cuts_no_ending_short(tmp_path: Path, number: int) -> None:
    (tmp_path / "ending.py").write_text(
        "import os, time\nfrom flows.cli import interrupts\n"
        f"def main():\n    try:\n        os.kill(os.getpid(), {int(number)})\n        time.sleep(60)\n    finally:\n"
        f"        os.kill(os.getpid(), {int(number)})\n        print('ended its programs')\n"
        "interrupts.install()\ninterrupts.run(main)\n"
    )
    running = command(tmp_path, program=(sys.executable, "-m", "ending"), PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output.split("\n\n")[0]) == (128 + number, "ended its programs")


def test_nohup_is_kept(tmp_path: Path) -> None:
    (tmp_path / "hung_up.py").write_text(
        "import os, signal\nfrom flows.cli import interrupts\ninterrupts.install()\n"
        "interrupts.run(lambda: (os.kill(os.getpid(), signal.SIGHUP), print('went on')))\n"
    )
    running = command(tmp_path, program=("nohup", sys.executable, "-m", "hung_up"), PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output.splitlines()[-1]) == (0, "went on")


def test_a_second_one_ends_a_command_that_is_still_ending_its_programs_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom flows.cli import interrupts\n"
        "def main():\n    try:\n        print('begun', flush=True)\n        time.sleep(60)\n    finally:\n"
        "        print('ending', flush=True)\n        time.sleep(60)\n"
        "interrupts.install()\ninterrupts.run(main)\n"
    )
    running = command(tmp_path, program=(sys.executable, "-m", "slow"), PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    assert running.stdout is not None
    for word in ("begun\n", "ending\n"):
        assert running.stdout.readline() == word
        running.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert running.wait(60) == -signal.SIGINT  # which a shell shows as 130
    assert time.monotonic() - begun < 50, "it ended its programs first"


def test_an_error_that_it_causes_is_still_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text(
        "import os, signal, time\nfrom flows.cli import app, interrupts\n"
        "def main():\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        app.end('a file was half written', 2)\n"
        "interrupts.install()\ninterrupts.run(main)\n"
    )
    running = command(tmp_path, program=(sys.executable, "-m", "torn"), PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    assert output.splitlines()[-1] == "interrupted before anything was started"


AT_WORK = """
import os, signal, sys, time
from contextlib import nullcontext
from types import SimpleNamespace
from flows.cli import app, interrupts
interrupts.install()
from flows.cli import session
from flows.cli.services import servers
import flows.compare_engines, flows.replay, flows.sweep
from infra.runs import run_state
from infra.tracking import upload
from tasks.comparisons import begin_comparison
from tasks.evaluations import find_adapter
from tasks.replays import begin_replay
from tasks.runs import finish_run
from tasks.sweeps import begin_sweep

def at_work(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def passes(*_, **__):
    return SimpleNamespace(weights=1, version=3)

session.with_prefect = lambda *_: nullcontext()
begin_sweep.check_sweep = lambda *_: []
for module, name in ((begin_comparison, "check_comparison"), (begin_replay, "plan_replay"), (run_state, "config_of"),
                     (find_adapter, "named_version"), (finish_run, "check_free")):
    setattr(module, name, passes)
for module, name in ((flows.sweep, "rl_sweep"), (flows.replay, "replay_step"), (flows.compare_engines, "compare_engines"),
                     (finish_run, "export"), (upload, "upload"), (servers, "start_services")):
    setattr(module, name, at_work)
sys.argv[0] = "ratchet"
interrupts.run(lambda: app.run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sweep --name rates --over trainer.learning_rate=1e-4,2e-4", "sweep rates has stopped, its runs keep what they have; `{}` goes on there"),
        ("replay mine 0 --name again", "the replay of step 0 has stopped; `{}` goes on with it; an engine that runs stays up: `ratchet down`"),
        ("compare-engines", "the comparison has stopped and keeps the steps that it has; `{}` goes on there; what runs stays up: `ratchet down`"),
        ("export mine", "adapter 3 was not exported whole; `{}` does it again"),
        ("upload", "what was uploaded is kept; `{}` brings the rest"),
        ("up", "what was started stays up: `ratchet down` ends them; `{}` starts the rest"),
    ],
)  # fmt: skip
def test_of_work_that_has_begun_it_says_what_is_kept_and_what_goes_on(tmp_path: Path, words: str, said: str) -> None:
    running = command(tmp_path, *words.split(), program=(sys.executable, "-c", AT_WORK))
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 130, output
    assert output.splitlines()[-1].startswith(f"interrupted: {said.format(f'ratchet {words}')}"), output


def test_stop_interrupts_a_second_time_what_does_not_end(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wont_end = "import signal, time\nwith open('heard', 'w', buffering=1) as heard:\n"
    wont_end += (
        "    signal.signal(signal.SIGINT, lambda *_: (print('one', file=heard), signal.signal(signal.SIGINT, signal.SIG_DFL)))\n"
    )
    wont_end += "    print('ready', file=heard)\n    while True: time.sleep(0.1)\n"
    running = subprocess.Popen([sys.executable, "-c", wont_end], cwd=workspace, start_new_session=True)
    heard = workspace / "heard"
    assert becomes(lambda: heard.exists() and "ready" in heard.read_text(), within_s=60)
    owner = Holder(who="run mine", process=children.ref_of(running.pid), workspace=workspace, since="10:00")
    monkeypatch.setattr(run_state, "check_exists", lambda run: None)
    monkeypatch.setattr(run_state, "owner_at_work", lambda run: owner)
    monkeypatch.setattr(run_state, "state_of", lambda run: SimpleNamespace(num_committed=3))
    monkeypatch.setattr(stop, "WAIT_S", 3.0)
    app.run(["stop", "mine", "--now"])
    assert running.wait(10) == -signal.SIGINT and "one" in heard.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("prefect_server", "ends_programs")
def test_in_a_step_of_a_run_in_a_shell(scripted: RunConfig, workspace: Path, number: int) -> None:
    url = PREFECT_API_URL.value()
    assert url
    running = command(workspace, "run", "--preset", "smoke", "--name", "shell", *options(scripted), PREFECT_API_URL=url)
    line = said_after(number, running, (workspace / "runs/shell/steps/000000/train/job.json").exists)
    assert "run shell has stopped, 0 of its steps are committed" in line
    assert "`ratchet run --preset smoke --name shell --model=" in line and "`ratchet down`" in line


@pytest.mark.full
@pytest.mark.timeout(900)
def test_in_quickstart_the_line_says_that_the_flow_run_goes_on(
    scripted: RunConfig, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    ports = {"RATCHET_PREFECT_PORT": str(FIRST_PORT + 80), "RATCHET_ENGINE_PORT": str(FIRST_PORT + 180)}
    try:
        running = command(workspace, "quickstart", "--run", "quick", *options(scripted), **ports)
        line = said_after(signal.SIGINT, running, (workspace / "runs/quick/steps/000000/train/job.json").exists)
        assert "goes on in the worker" in line and "goes on with run quick" in line
        flow_run = line.partition("flow run ")[2].split()[0]
        with prefect_api.api_client(servers.ensure_prefect()) as client:
            assert becomes(lambda: state_of(client, flow_run) == "COMPLETED", within_s=240)
        assert (workspace / "runs/quick/steps/000000/manifest.json").exists()
    finally:
        command(workspace, "down").communicate(timeout=120)
        settings.cache_clear()


def state_of(client: httpx.Client, flow_run: str) -> str:
    return str(client.get(f"/flow_runs/{flow_run}").raise_for_status().json()["state"]["type"])
