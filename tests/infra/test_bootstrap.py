"""How the making of environments shows its progress."""

import io
import sys
from pathlib import Path

import pytest

from infra import bootstrap
from infra.bootstrap import Counted, Status


def test_packages_are_counted_by_what_pip_says(tmp_path: Path) -> None:
    lock = tmp_path / "main.txt"
    lock.write_text("# made by pip\n--extra-index-url x\na==1\nb==2\n\nc==3\n")
    counted = Counted(".venv", bootstrap.num_packages(lock))
    assert counted.hear("Collecting a==1\n") == ".venv: 1 of 3 packages fetched"
    assert counted.hear("  Downloading a-1.whl (3 kB)\n") == ".venv: 1 of 3 packages fetched"
    counted.hear("Requirement already satisfied: b==2 in x\n")
    counted.hear("Collecting c==3\n")
    assert counted.hear("Installing collected packages: a, c\n") == ".venv: 3 of 3 packages fetched, installing"


def test_a_terminal_has_one_line_for_both_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    status = Status()
    status.say(".venv: 1 of 3 packages fetched")
    status.say(".venv-sglang: 2 of 9 packages fetched")
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\n" not in shown
    assert shown.split("\r")[-1].startswith(".venv: 1 of 3 packages fetched; .venv-sglang: 2 of 9 packages fetched, ")


def test_elsewhere_there_is_a_line_every_ten_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(bootstrap.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    status = Status()
    for number in range(250):
        now[0] += 0.1
        status.say(f".venv: {number} of 300 packages fetched")
    assert len(sys.stdout.getvalue().splitlines()) == 2  # type: ignore[attr-defined]


def test_a_pip_that_fails_says_why(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho Collecting a\necho 'no such version'\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="no such version"):
        bootstrap.pip(tmp_path, "install", "a")
