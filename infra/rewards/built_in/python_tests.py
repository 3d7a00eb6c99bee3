"""A reward for Python code: the completion's code passes the tests of the row, in a process of its own.

What it protects against, and what not, is in docs/how-to/add-a-reward.md. It is no sandbox.
"""

import ctypes
import json
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infra.rewards.built_in import python_program
from infra.rewards.built_in.base import BuiltIn, shown
from infra.rewards.processes import end_orphans
from infra.rewards.signatures import Fields

FENCED = re.compile(r"(?:(?<!\S)```[ \t]*([^\n`]*)|```(?:python3?|py)[ \t]*)\n(.*?)```", re.DOTALL | re.IGNORECASE)
LANGUAGES = ("", "python", "python3", "py")
"""Of blocks that are code. Those of other languages are passed over, each with its end: that begins no block."""
PR_SET_CHILD_SUBREAPER = 36
CPU_SECONDS = 5
"""For one run of the code, where the row has no column `time_limit_s`."""
WAIT_FACTOR = 10
"""A run may last its CPU time times this: code that waits has failed then, and a busy machine has had time enough."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


class PythonTests(NamedTuple):
    """What a row has to test code with: statements that run after it, or texts for its standard input with the outputs that are right."""

    statements: str = ""
    runs: Sequence[tuple[str, str]] = ()
    cpu_s: int = CPU_SECONDS


class PassesTests(BuiltIn):
    """1 if the code passes all tests of its row, else 0. Code is the last fenced block of the completion, or all of it."""

    def setup(self) -> None:
        """Have the processes that a completion's code leaves behind become children of this worker."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def __call__(self, *, completion: str, row: Fields) -> float:
        tests, code = tests_of(row), code_in(completion)
        if tests.statements:
            return float(_run(code, tests).has_passed)
        return float(all(_is_same(_run(code, tests, given).output, expected) for given, expected in tests.runs))

    def check_row(self, answer: str, row: Fields) -> None:
        tests_of(row)


def code_in(completion: str) -> str:
    """Return the last fenced block of a completion that names no language or Python, without the indentation of a list that it stands in; all
    of the completion where it has none."""
    blocks = [code for language, code in FENCED.findall(completion) if language.strip().lower() in LANGUAGES]
    if not blocks:
        return completion
    return textwrap.dedent(blocks[-1]) if blocks[-1].lstrip("\n")[:1] in (" ", "\t") else str(blocks[-1])


def tests_of(row: Fields) -> PythonTests:
    """Return a row's tests: its column `tests`, MBPP's `test_list` or HumanEval's `test` with `entry_point`.

    Raises:
        ValueError: for a row without tests, or with some that are no Python.
    """
    found, cpu_s = row.get("tests"), _cpu_s(row)
    if isinstance(found, dict) or (isinstance(found, str) and found.lstrip().startswith("{")):
        return PythonTests(runs=_runs(found), cpu_s=cpu_s)
    statements = _text(found) or _of_mbpp(row) or _of_human_eval(row)
    if not statements.strip():
        raise ValueError(
            "the row has no tests: python_tests needs the column 'tests', with Python statements or {\"inputs\": [...], "
            "\"outputs\": [...]}; or MBPP's 'test_list', or HumanEval's 'test' and 'entry_point'"
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(statements, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the row's tests {shown(statements)} are no Python: {error}: correct them") from None
    return PythonTests(statements, cpu_s=cpu_s)


def _text(found: object) -> str:
    lines: list[Any] = found if isinstance(found, list) else [found or ""]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(f"the row's tests are {shown(found)}: give Python statements as text, or as a list of texts")
    return "\n".join(lines)


def _of_mbpp(row: Fields) -> str:
    tests = _text(row.get("test_list"))
    before = [_text(row.get(column)) for column in ("test_imports", "test_setup_code")]
    return "\n".join([*filter(None, before), tests]) if tests else ""


def _of_human_eval(row: Fields) -> str:
    tests, name = _text(row.get("test")), _text(row.get("entry_point"))
    return f"{tests}\ncheck({name})\n" if tests and name else ""


def _runs(given: dict[str, Any] | str) -> list[tuple[str, str]]:
    try:
        found: dict[str, Any] = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        found = {}
    inputs: Any = found.get("inputs")  # Any: of the user's row
    outputs: Any = found.get("outputs")
    is_sound = isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0
    if not is_sound or found.get("fn_name") or not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise ValueError(
            f"the row's tests are {shown(given)}: give as many 'inputs' as 'outputs', texts of standard input and output, and no 'fn_name'"
        )
    return list(zip(inputs, outputs, strict=True))


def _cpu_s(row: Fields) -> int:
    found = row.get("time_limit_s")
    if found is None:
        return CPU_SECONDS
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < math.inf:
        raise ValueError(f"the row's column 'time_limit_s' is {shown(found)}: give seconds above 0")
    return math.ceil(found)


class _Run(NamedTuple):
    has_passed: bool
    """Whether the code and all statements ran without an error."""
    output: str | None
    """What it wrote. None: it failed."""


def _run(code: str, tests: PythonTests, given: str = "") -> _Run:
    """Run code once with the statements of its tests. Raises RuntimeError if its process is killed from outside."""
    token = secrets.token_hex()
    name = "completion" if tests.statements else "__main__"
    job = {"code": code, "tests": tests.statements, "token": token, "cpu_s": tests.cpu_s, "name": name}
    with tempfile.TemporaryDirectory(prefix="ratchet-tests-") as folder:
        path, output = Path(folder) / "job", Path(folder) / "output"
        path.write_text(json.dumps(job))
        (Path(folder) / "input").write_text(given)
        before = _cpu_of_children()
        exit_code, said = _wait(path, output, WAIT_FACTOR * tests.cpu_s)
        if exit_code == -signal.SIGKILL and _cpu_of_children() - before < tests.cpu_s:
            raise RuntimeError("the process of the tests was killed from outside")
        written = output.read_bytes().decode(errors="replace")
    return _Run(said == token, written if exit_code == 0 else None)


def _wait(job: Path, output: Path, wait_s: float) -> tuple[int | None, str]:
    """Run a job and return its exit code, None if it lasted too long, and what it wrote to its descriptor. Nothing of it is left."""
    theirs, ours = os.pipe()[::-1]
    work = job.parent / "work"
    work.mkdir()
    try:
        with (job.parent / "input").open("rb") as given, output.open("wb") as written:
            program = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", python_program.__file__, str(job), str(theirs)],
                stdin=given,
                stdout=written,
                stderr=subprocess.DEVNULL,
                env={**ENVIRONMENT, "HOME": str(work)},
                cwd=work,
                start_new_session=True,
                pass_fds=(theirs,),
            )
        try:
            exit_code: int | None = program.wait(wait_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        program.kill()
        program.wait()
        end_orphans(set())
    finally:
        os.close(theirs)
    with open(ours, "rb") as said:
        return exit_code, said.read(1000).decode(errors="replace")


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _is_same(output: str | None, expected: str) -> bool:
    """Compare line by line; blanks at the ends of lines and empty lines at the end do not count."""
    return output is not None and _lines(output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
