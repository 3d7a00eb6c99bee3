import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from shared import becomes, is_gone

from infra.processes import children
from infra.processes.children import ProcessRef, ProgramFailed, ProgramTimedOut
from infra.settings import CHECKOUT

IN_A_SESSION_OF_ITS_OWN = "setsid sleep 300 & echo $!; "
"""A grandchild that a signal to its parent's group would miss, as torchrun's ranks are."""


def bash(script: str) -> list[str]:
    return ["bash", "-c", script]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ProcessRef]]:
    """Start a script as a server whose log is tmp_path/log."""
    started: list[ProcessRef] = []

    def begin(script: str) -> ProcessRef:
        started.append(children.start(bash(script), tmp_path / "log"))
        return started[-1]

    yield begin
    for ref in started:
        children.stop(ref, grace_s=0.1)


def test_lines_are_handed_on_while_the_program_runs_and_kept_in_its_log(tmp_path: Path) -> None:
    seen: list[str] = []

    def on_line(line: str) -> None:
        seen.append(line)
        (tmp_path / "go").touch()

    waits = "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two >&2; printf three"
    children.run(bash(waits), tmp_path / "logs/log", timeout_s=20, cwd=tmp_path, on_line=on_line)
    assert seen == ["one", "two", "three"]
    assert (tmp_path / "logs/log").read_text() == "one\ntwo\nthree"


def test_a_program_sees_our_environment_with_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    monkeypatch.setenv("CHANGED", "1")
    seen: list[str] = []
    children.run(bash("echo $OURS $CHANGED"), tmp_path / "log", timeout_s=20, env={"CHANGED": "2"}, on_line=seen.append)
    assert seen == ["1 2"]


def test_a_failed_program_is_reported_with_its_exit_code_and_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed) as caught:
        children.run(bash("seq 1000 1100; echo Traceback; exit 3"), tmp_path / "log", timeout_s=20)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert message.startswith(f"bash exited with 3; the end of {tmp_path / 'log'}:\n1062\n")
    assert message.endswith("1100\nTraceback")


def test_a_killed_program_is_reported_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="bash exited with -9") as caught:
        children.run(bash("kill -9 $$"), tmp_path / "log", timeout_s=20)
    assert caught.value.exit_code == -9


@pytest.mark.parametrize(
    "script", [IN_A_SESSION_OF_ITS_OWN + "wait", "setsid bash -c 'trap \"\" TERM; echo $$; sleep 300' & wait"], ids=["", "deaf"]
)
def test_a_time_out_ends_grandchildren_in_sessions_of_their_own(tmp_path: Path, script: str) -> None:
    seen: list[str] = []
    with pytest.raises(ProgramTimedOut, match=r"bash was ended after 1\.5 s; the end of .*\n\d+"):
        children.run(bash(script), tmp_path / "log", timeout_s=1.5, on_line=seen.append)
    assert becomes(lambda: is_gone(int(seen[0])))


def test_an_interruption_ends_the_whole_program(tmp_path: Path) -> None:
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        children.run(bash(IN_A_SESSION_OF_ITS_OWN + "wait"), tmp_path / "log", timeout_s=20, on_line=interrupt)
    assert becomes(lambda: is_gone(int(seen[0])))


def test_what_a_killed_program_leaves_behind_is_ended_and_does_not_hold_us_up(tmp_path: Path) -> None:
    seen: list[str] = []
    start = time.monotonic()
    with pytest.raises(ProgramFailed, match="bash exited with -9"):
        children.run(bash(IN_A_SESSION_OF_ITS_OWN + "kill -9 $$"), tmp_path / "log", timeout_s=60, on_line=seen.append)
    assert time.monotonic() - start < 50
    assert becomes(lambda: is_gone(int(seen[0])))


def test_what_a_finished_program_leaves_behind_is_gone_when_the_run_returns(tmp_path: Path) -> None:
    seen: list[str] = []
    silent = IN_A_SESSION_OF_ITS_OWN.replace("&", ">/dev/null 2>&1 &", 1)
    children.run(bash(silent + "exit 0"), tmp_path / "log", timeout_s=60, on_line=seen.append)
    assert is_gone(int(seen[0]))


def test_a_process_that_is_becoming_another_program_is_not_passed_over(
    start: Callable[[str], ProcessRef], tmp_path: Path
) -> None:
    restless = tmp_path / "restless"
    restless.write_text('#!/bin/sh\nexec "$0"\n')
    restless.chmod(0o700)
    ref = start(f"exec {restless}")
    assert all(children.of_program([ref.pid], ref.program) for _ in range(3000))
    children.stop(ref)
    assert is_gone(ref.pid)


def test_a_server_writes_to_its_log_until_it_is_stopped_with_its_tree(start: Callable[[str], ProcessRef], tmp_path: Path) -> None:
    ref = start(IN_A_SESSION_OF_ITS_OWN + "sleep 300 & echo $!; wait")
    log = tmp_path / "log"
    assert becomes(lambda: log.exists() and len(log.read_text().split()) == 2)
    tree = [ref.pid, *map(int, log.read_text().split())]
    assert not any(is_gone(pid) for pid in tree)
    assert children.resident_bytes(ref) > 100_000
    children.stop(ref)
    assert becomes(lambda: all(is_gone(pid) for pid in tree))
    assert children.resident_bytes(ref) == 0
    children.stop(ref)


def test_a_server_that_ends_by_itself_does_not_linger(start: Callable[[str], ProcessRef]) -> None:
    ref = start("exit 0")
    assert becomes(lambda: not psutil.pid_exists(ref.pid))
    assert children.find(ref) is None


def test_a_process_with_another_start_time_is_another_process() -> None:
    me = children.ref_of(os.getpid())
    found = children.find(me)
    assert found is not None
    assert found.pid == os.getpid()
    assert children.find(me.model_copy(update={"started_ticks": me.started_ticks - 100})) is None


def test_stopping_a_reference_whose_pid_went_to_another_process_stops_nothing(start: Callable[[str], ProcessRef]) -> None:
    ref = start("sleep 300")
    children.stop(ref.model_copy(update={"started_ticks": ref.started_ticks - 100, "program": ""}))
    assert children.find(ref) is not None


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    ref = children.ref_of(child.pid)
    assert becomes(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert children.find(ref) is None
    child.wait()


def test_waiting_for_a_server_ends_when_it_is_ready(start: Callable[[str], ProcessRef], tmp_path: Path) -> None:
    ref = start("echo ready; sleep 300")
    log = tmp_path / "log"
    children.wait_until(lambda: "ready" in log.read_text(), what="server", timeout_s=20, ref=ref, log_path=log)
    assert children.find(ref)


def test_a_server_that_ends_while_starting_is_reported_with_its_log(start: Callable[[str], ProcessRef], tmp_path: Path) -> None:
    ref = start("echo no such model; exit 1")
    with pytest.raises(ProgramFailed, match=r"engine ended while starting; the end of .*/log:\nno such model"):
        children.wait_until(lambda: False, what="engine", timeout_s=20, ref=ref, log_path=tmp_path / "log")


def test_a_server_that_is_never_ready_is_ended_and_reported_with_its_log(
    start: Callable[[str], ProcessRef], tmp_path: Path
) -> None:
    ref = start("echo loading; sleep 300")
    with pytest.raises(ProgramTimedOut, match=r"engine was not ready after 0\.3 s; the end of .*/log:\nloading"):
        children.wait_until(lambda: False, what="engine", timeout_s=0.3, ref=ref, log_path=tmp_path / "log")
    assert children.find(ref) is None


def test_python_programs_do_not_keep_their_lines_back(tmp_path: Path) -> None:
    seen: list[str] = []
    script = "import sys; print('x'); print(bytes([255]) and 'y'); sys.stdout.buffer.write(bytes([255])); raise SystemExit(2)"
    with pytest.raises(ProgramFailed):
        children.run([sys.executable, "-S", "-c", script], tmp_path / "log", timeout_s=30, on_line=seen.append)
    assert seen == ["x", "y", "\ufffd"]


OWNER = """
import sys
from pathlib import Path
from infra.processes import children
print("ready", flush=True)
children.run(["bash", "-c", sys.argv[2]], Path(sys.argv[1]) / "child.log", timeout_s=600, program="f" * 32)
"""


@pytest.mark.parametrize("strike", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_ends_with_the_process_that_waits_for_it(tmp_path: Path, strike: signal.Signals) -> None:
    script = f"touch {tmp_path}/begun; exec sleep 600"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), script], cwd=CHECKOUT)
    wait_for((tmp_path / "begun").exists)
    (child,) = psutil.Process(owner.pid).children()
    owner.send_signal(strike)
    owner.wait()
    try:
        wait_for(lambda: is_gone(child.pid))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_a_program_whose_owner_ended_before_it_began_is_not_run(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    command = [sys.executable, str(children.WITH_OWNER), str(ended.pid), "touch", str(tmp_path / "begun")]
    assert subprocess.run(command, check=False).returncode
    assert not (tmp_path / "begun").exists()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="no-such-program: No such file or directory"):
        children.run(["/no-such-program"], tmp_path / "log", timeout_s=60)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
