"""Programs as agents: what becomes of one that prints no reward, fails or hangs."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from shared import becomes, is_gone

from infra.environments.program import check_command, run_program


def outcome_of(program: str, timeout_s: float = 60) -> dict[str, Any]:
    return run_program([sys.executable, "-c", program], {"question": "17 + 25?"}, {"OPENAI_MODEL": "policy"}, timeout_s)


def test_a_program_gets_task_and_variables_and_its_last_line_is_its_reward() -> None:
    program = "import json, os; t = json.loads(input()); print('hm'); print(json.dumps({'reward': 1, os.environ['OPENAI_MODEL']: len(t)}))"
    assert outcome_of(program) == {"reward": 1, "policy": 1}


@pytest.mark.parametrize(
    ("program", "kind", "problem"),
    [
        ("raise SystemExit(3)", RuntimeError, "the program ended with 3"),
        ("print('hm')", ValueError, "the program's last line is 'hm', must be as"),
        ("pass", ValueError, "the program's last line is ''"),
        ("print('[1]')", ValueError, "the program's last line is"),
        ("print('{\"reward\": 1' + ' ' * 2000000 + '}')", ValueError, "the program's last line is"),
    ],
)
def test_a_program_without_a_reward_is_an_error(program: str, kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem) as caught:
        outcome_of(program)
    assert "\n" not in str(caught.value)


def test_a_program_that_fails_is_named_by_its_last_words_and_all_of_them_are_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match=r"^the program ended with 1: ValueError: my own mistake$"):
        outcome_of("import sys; print('begins', file=sys.stderr); raise ValueError('my own mistake')")
    said = capsys.readouterr().err
    assert said.startswith("begins\nTraceback") and said.endswith("ValueError: my own mistake\n")


def test_a_hanging_program_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = "import subprocess, time; child = subprocess.Popen(['sleep', '600'])"
    script = f"{started}; open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    with pytest.raises(TimeoutError, match=r"not done after environment\.episode_timeout_s 3"):
        outcome_of(script, timeout_s=3)
    pid = int((tmp_path / "pid").read_text())
    assert becomes(lambda: is_gone(pid))  # the kernel ends it, at its next turn


def test_what_a_program_leaves_behind_does_not_hold_its_episode() -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '600']); print('{\"reward\": 0.5}')"
    assert outcome_of(program, timeout_s=30) == {"reward": 0.5}


def test_a_command_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"program '/nowhere/agent' cannot be started"):
        run_program(["/nowhere/agent"], {}, {}, 5)
    (tmp_path / "agent").touch(os.O_RDONLY)
    for name in ("/nowhere/agent", str(tmp_path / "agent")):
        with pytest.raises(ValueError, match=r"does not exist or cannot be executed$"):
            check_command([name])
    with pytest.raises(
        ValueError, match=r'program \'python3 agent.py\' does not exist .*: give each word by itself, such as \["python3", "'
    ):
        check_command(["python3 agent.py"])
    with pytest.raises(
        ValueError, match=r"^program 'python3' is to run 'no/agent.py', which does not exist: give its path from here"
    ):
        check_command(["python3", "no/agent.py", "--fast"])
    for command in (["python3", "-m", "no.module"], ["python3"], [sys.executable, __file__], ["echo", "no/agent.py"]):
        check_command(command)
