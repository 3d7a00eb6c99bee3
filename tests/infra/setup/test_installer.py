"""What installs a lock: uv with the sources of pip's configuration, or pip; and how progress is shown."""

import io
import sys
from pathlib import Path

import pytest
from shared import becomes

from infra.setup import installer
from infra.setup.installer import Counted, Installer, Status, sources_of


def test_packages_are_counted_by_what_pip_says(tmp_path: Path) -> None:
    lock = tmp_path / "main.txt"
    lock.write_text("# made by pip\n--extra-index-url x\na==1\nb==2\n\nc==3\n")
    counted = Counted(".venv", installer.num_packages(lock))
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
    monkeypatch.setattr(installer.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    status = Status()
    for number in range(250):
        now[0] += 0.1
        status.say(f".venv: {number} of 300 packages fetched")
    assert len(sys.stdout.getvalue().splitlines()) == 2  # type: ignore[attr-defined]


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def main(tmp_path: Path) -> Path:
    """A main environment whose python does what pip would be told, in words, and whose uv notes what it is called with."""
    folder = tmp_path / ".venv"
    program(
        folder / "bin/python",
        f'echo "pip $*" >> {tmp_path}/called',
        f'case "$*" in *"config list") echo "global.find-links=\'/wheels /more\'" ;; *uv==*) exit $(cat {tmp_path}/uv-fails) ;; esac',
        "echo Collecting a",
        f'[ -e {tmp_path}/pip-fails ] && echo "no such version" && exit 1',
        "exit 0",
    )
    program(
        folder / "bin/uv",
        f'echo "uv $*, links $UV_FIND_LINKS, $UV_INDEX_STRATEGY" >> {tmp_path}/called',
        f"exit $(cat {tmp_path}/lock-fails)",
    )
    for name in ("uv-fails", "lock-fails"):
        (tmp_path / name).write_text("0")
    return folder


def installed(main: Path) -> list[str]:
    """Install one package into another environment; gives the calls that did so."""
    Installer(main, "1.2").install(main.parent / ".venv-engine", "--no-deps", "a")
    return [line for line in (main.parent / "called").read_text().splitlines() if line.endswith("a") or " a, " in line]


def test_uv_installs_from_the_sources_that_pip_has(main: Path) -> None:
    (call,) = installed(main)
    assert (
        call
        == f"uv pip install --python {main.parent}/.venv-engine/bin/python --no-deps a, links /wheels,/more, unsafe-best-match"
    )


def test_what_uv_has_installed_is_compiled_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    packages = tmp_path / ".venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "known.py").write_text("VALUE = 1\n")
    program(tmp_path / ".venv/bin/python", f'exec {sys.executable} "$@"')
    installer.compile_in_background(tmp_path / ".venv")
    assert becomes(lambda: bool(list(packages.glob("__pycache__/known.*.pyc"))), within_s=60)


def test_a_variable_of_the_user_counts_more_than_pip_s_configuration(main: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", "/mine")
    (call,) = installed(main)
    assert ", links /mine, " in call


def test_pip_does_it_where_uv_cannot_be_had(main: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (main.parent / "uv-fails").write_text("1")
    (main / "bin/uv").unlink()
    Installer(main, "1.2").install(main.parent / ".venv-engine", "--no-deps", "a")
    last = (main.parent / "called").read_text().splitlines()[-1]
    assert last.endswith(f"--python {main.parent}/.venv-engine/bin/python install --no-deps a --progress-bar off")
    assert "uv 1.2 cannot be installed here: pip makes the environments" in capsys.readouterr().out


def test_pip_tries_what_uv_could_not_install_and_says_why_it_failed(main: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (main.parent / "lock-fails").write_text("2")
    (main.parent / "pip-fails").write_text("")
    with pytest.raises(SystemExit, match="no such version"):
        Installer(main, "1.2").install(main, "--no-deps", "a")
    assert "uv failed for .venv, pip tries the same: exit code 2" in capsys.readouterr().out


def test_pip_s_environment_counts_more_than_its_files() -> None:
    listed = ":env:.find-links='/env'\nglobal.find-links='/file'\nglobal.extra-index-url='https://a/simple https://b/simple'\nglobal.timeout='9'"
    assert sources_of(listed) == {"UV_FIND_LINKS": "/env", "UV_INDEX": "https://a/simple https://b/simple"}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "the disk is full: make room",
        ),
        ("WARNING: Retrying ... NameResolutionError(x)\nERROR: none\n", "the package index cannot be reached: check the network"),
        ("ERROR: No matching distribution found for torch==2.9.0\n", "the package index has no torch==2.9.0: set PIP_INDEX_URL"),
        (
            "error: command 'gcc' failed: No such file or directory\n",
            "a package has to be compiled, and the compiler gcc is missing",
        ),
        ("Collecting a\nERROR: something else\n[notice] a new pip\n", "ERROR: something else"),
    ],
)
def test_what_an_installer_says_at_length_becomes_one_line_with_a_cure(said: str, why: str) -> None:
    line = installer.why_failed(said.splitlines(keepends=True))
    assert line.startswith(why) and "\n" not in line
