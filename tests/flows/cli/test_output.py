"""What a command prints where nobody can read it, or the terminal lacks a character."""

import os
import subprocess
import sys
from pathlib import Path

from infra.settings import CHECKOUT

WORKS = (
    "import sys\nfrom pathlib import Path\nfrom flows.cli import app\n"
    "def work(words):\n"
    "    import logging\n    logging.basicConfig(stream=sys.stdout, level='INFO')\n"
    "    for number in range(3):\n        logging.info('step %d', number)\n        print('caf\\u00e9 \\u4e2d', flush=True)\n"
    "    Path('done').touch()\n"
    "app.run = work\nsys.argv = ['ratchet']\napp.main()\n"
)


def outcome(folder: Path, stdout: int, **environment: str) -> "subprocess.CompletedProcess[str]":
    known = dict(os.environ) | {"PYTHONPATH": str(CHECKOUT)} | environment
    return subprocess.run(
        [sys.executable, "-c", WORKS], cwd=folder, env=known, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
    )


def test_work_goes_on_in_silence_when_the_reader_of_its_lines_has_ended(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = outcome(tmp_path, writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "") and (tmp_path / "done").exists()


def test_work_goes_on_when_its_terminal_was_closed(tmp_path: Path) -> None:
    main, terminal = os.openpty()
    os.close(main)
    ended = outcome(tmp_path, terminal)
    os.close(terminal)
    assert (ended.returncode, ended.stderr) == (0, "") and (tmp_path / "done").exists()


def test_lines_that_a_full_disk_did_not_take_are_an_error_after_the_work(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = outcome(tmp_path, full.fileno())
    assert (tmp_path / "done").exists()
    said = "error: what this command printed is not whole: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_a_closed_stdout_ends_no_command(tmp_path: Path) -> None:
    closes = f'exec {sys.executable} -c "$1" >&-'
    command = ["sh", "-c", closes, "sh", WORKS]
    known = dict(os.environ) | {"PYTHONPATH": str(CHECKOUT)}
    ended = subprocess.run(command, cwd=tmp_path, env=known, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "") and (tmp_path / "done").exists()


def test_a_character_that_the_terminal_lacks_is_spelt_out(tmp_path: Path) -> None:
    ended = outcome(tmp_path, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, "") and r"caf\xe9 \u4e2d" in ended.stdout
