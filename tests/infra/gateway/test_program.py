"""Programs as agents, in front of the scripted engine."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from infra.gateway.http.server import OpenSession
from infra.gateway.program import ProgramOutcome, run_program


def outcome_of(program: str, timeout_s: float = 60) -> ProgramOutcome:
    opened = OpenSession(None, "http://127.0.0.1:1/v1", "key", None)  # type: ignore[arg-type]
    return asyncio.run(run_program(opened, [sys.executable, "-c", program], {"question": "17 + 25?"}, timeout_s))


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("raise SystemExit(3)", "the program ended with 3"),
        ("print('hm')", "the program's last line is 'hm'"),
        ("pass", "the program's last line is ''"),
        ("print('{\"reward\": NaN}')", "the program's reward is nan, must be a finite number"),
        ("print('{\"reward\": true}')", "the program's reward is True"),
        ("print('x' * 2000000)", "printed a line of more than"),
    ],
)
def test_a_program_without_a_reward_is_not_judged(program: str, problem: str) -> None:
    reward, found = outcome_of(program)
    assert reward is None
    assert found.startswith(problem) or problem in found
    assert "\n" not in found


def test_a_hanging_program_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = "import subprocess, time; child = subprocess.Popen(['sleep', '600'])"
    script = f"{started}; open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    outcome = outcome_of(script, timeout_s=3)
    assert outcome == ProgramOutcome(None, "the program was not done after 3 s")
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_does_not_exist_is_one_line() -> None:
    opened = OpenSession(None, "", "", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the agent's command \['/nowhere/agent'\] cannot be started"):
        asyncio.run(run_program(opened, ["/nowhere/agent"], {}, 5))
