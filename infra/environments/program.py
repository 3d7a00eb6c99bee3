"""Run a program of any language as an agent, in the worker that plays its episode.

It gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL as variables and the task as one JSON object on its standard input. The last line that
it prints is its reward: `{"reward": 1.0}`, with further parts if it likes. A program that fails, hangs or prints no reward has no reward, never 0.
What it writes as errors is in the worker's log when it has ended, and the last line in the error.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

INTERPRETER = re.compile(r"python[\d.]*|bash|sh|node|perl|ruby")
"""Programs whose first word, if it is no option, is a file."""
MAX_LINE_BYTES = 1 << 20
"""Longest line of a reward."""
MAX_ERROR_BYTES = 64 << 10
"""Of a program's error output, which are kept: the last ones."""
SHOWN = 200


def check_command(command: Sequence[str]) -> None:
    """Raises ValueError if there is no such program, or not the script that an interpreter is given."""
    if shutil.which(command[0]) is None:
        hint = ': give each word by itself, such as ["python3", "agent.py"]' if " " in command[0] else ""
        raise ValueError(f"program {command[0]!r} does not exist or cannot be executed{hint}")
    script = next(iter(command[1:]), "-")
    if INTERPRETER.fullmatch(Path(command[0]).name) and not script.startswith("-") and not Path(script).exists():
        raise ValueError(
            f"program {command[0]!r} is to run {script!r}, which does not exist: give its path from here, or all of it"
        )


def run_program(
    command: Sequence[str], task: Mapping[str, Any], variables: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """Run a program to its end, and end all that it started. Returns the JSON object of its last line.

    variables: Besides those of this process. timeout_s: Longest time for the whole episode, in seconds.

    Raises:
        ValueError: if it cannot be started, or prints no reward.
        RuntimeError: if it fails.
        TimeoutError: if it takes longer.
    """
    with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as errors:
        given.write(json.dumps(task).encode() + b"\n")
        given.seek(0)
        try:
            # A session of its own: what it started is ended with it.
            process = subprocess.Popen(
                command, stdin=given, stdout=printed, stderr=errors, env=os.environ | dict(variables), start_new_session=True
            )
        except OSError as error:
            raise ValueError(f"program {command[0]!r} cannot be started: {error}") from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the program was not done after environment.episode_timeout_s {timeout_s:g}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            words = _end_of(errors, MAX_ERROR_BYTES)
            if words:
                print("\n".join(words), file=sys.stderr, flush=True)
        if code:
            raise RuntimeError(f"the program ended with {code}{f': {words[-1][:SHOWN]}' if words else ''}")
        return _reward_in(_end_of(printed, MAX_LINE_BYTES))


def _end_of(file: IO[bytes], most: int) -> list[str]:
    """Return the last lines of a file, without blank ones. most: in bytes."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _reward_in(lines: list[str]) -> dict[str, Any]:
    last = lines[-1] if lines else ""
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "reward" not in found:
        raise ValueError(f'the program\'s last line is {last!r:.80}, must be as {{"reward": 1.0}}')
    return found
