"""How environments are made: whose they are, and what makes none."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from infra.setup import bootstrap


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds the set-up scripts alone; PYTHON and .venv/bin/python only note that they were called."""
    folder = tmp_path / "checkout"
    (folder / "infra/setup").mkdir(parents=True)
    for name in ("quickstart", "setup/bootstrap.py"):
        shutil.copy(bootstrap.CHECKOUT / "infra" / name, folder / "infra" / name)
    noting(tmp_path / "python3", tmp_path / "called")
    return folder


def noting(program: Path, notes: Path) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> "{notes}"\n')
    program.chmod(0o755)


def quickstart(checkout: Path, option: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": str(checkout.parent / "python3")}
    command = [str(checkout / "infra/quickstart"), option]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", ["--stop", "--help", "-h"])
def test_options_that_start_nothing_make_no_environment(checkout: Path, tmp_path: Path, option: str) -> None:
    for program in ("python", "ratchet"):
        noting(checkout / ".venv/bin" / program, tmp_path / "called")
    assert quickstart(checkout, option).returncode == 0
    assert (tmp_path / "called").read_text() == f"{checkout}/.venv/bin/ratchet quickstart {option}\n"


def test_stop_without_an_environment_says_so_and_makes_none(checkout: Path, tmp_path: Path) -> None:
    done = quickstart(checkout, "--stop")
    assert (done.returncode, done.stdout) == (0, "nothing to stop: this checkout has no environment yet\n")
    assert not (tmp_path / "called").exists() and not (checkout / ".venv").exists()


def made_for(folder: Path) -> Path:
    """What `python -m venv` and our stamp leave in a folder."""
    folder.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\ncommand = /usr/bin/python3 -m venv {folder}\n")
    (folder / bootstrap.STAMP).write_text("a digest with the path of that checkout in it")
    noting(folder / "bin/pip", folder.parent / "called")
    noting(folder / "bin/python", folder.parent / "called")
    return folder


@pytest.mark.parametrize("how", ["linked", "copied"])
def test_an_environment_of_another_checkout_is_refused_and_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    theirs, mine = made_for(tmp_path / "theirs/.venv"), tmp_path / "mine/.venv"
    mine.parent.mkdir()
    if how == "linked":
        mine.symlink_to(theirs)
    else:
        shutil.copytree(theirs, mine)
    with pytest.raises(SystemExit, match=rf"^{mine} .*{theirs}.*remove"):
        bootstrap.make_venv(mine)
    assert not (theirs.parent / "called").exists()
    assert (theirs / bootstrap.STAMP).read_text() == "a digest with the path of that checkout in it"


def test_a_link_to_a_folder_that_holds_no_environment_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / ".venv"
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="is a link"):
        bootstrap.make_venv(mine)
    assert not (tmp_path / "elsewhere").exists()


def test_an_environment_of_this_checkout_is_taken_as_it_is(tmp_path: Path) -> None:
    bootstrap.make_venv(made_for(tmp_path / ".venv"))


def test_a_venv_that_cannot_be_made_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"cannot make .*file/\.venv"):
        bootstrap.make_venv(tmp_path / "file/.venv")


def test_a_python_without_ensurepip_is_named_with_the_package_to_install() -> None:
    why = bootstrap.why_no_venv("The virtual environment was not created successfully because ensurepip is not\navailable.\n")
    assert "has no ensurepip: install python3." in why and "\n" not in why


def test_a_disk_without_room_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "CHECKOUT", tmp_path)
    monkeypatch.setattr(bootstrap, "NEEDED_GIB", 1e9)
    with pytest.raises(SystemExit, match=r"GiB free, the environments take 1e\+09 to 9: make room first"):
        bootstrap.check_room()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / bootstrap.STAMP).write_text("")
    bootstrap.check_room()


def test_a_python_that_is_not_there_is_one_line(checkout: Path) -> None:
    done = subprocess.run(
        [str(checkout / "infra/quickstart")], env=os.environ | {"PYTHON": "python9"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: python9 is not installed: install Python 3.11 or 3.12, or set PYTHON to one\n",
    )


@pytest.mark.parametrize(("lane", "options"), [("full", " --inspect --verifiers --ray"), ("quick", ""), ("", "")])
def test_the_full_lane_has_the_environments_of_inspect_ai_and_verifiers(tmp_path: Path, lane: str, options: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 3\n')
    python.chmod(0o755)
    command = [str(bootstrap.CHECKOUT / "infra/test"), *filter(None, [lane])]
    done = subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, timeout=60, check=False)
    assert done.returncode == 3 and (tmp_path / "asked").read_text() == f"infra/setup/bootstrap.py{options}\n"
