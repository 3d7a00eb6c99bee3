"""The flow's side of the program that runs a task of inspect-ai."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from infra.engines.server.installed import installed
from infra.environments.inspect_tasks import program
from infra.failures import EvaluationLost
from infra.processes import child_environment, children
from infra.processes.children import ProgramFailed, ProgramTimedOut
from infra.settings import settings
from infra.store import code_digest
from infra.store.files import read_json

PACKAGE = "inspect_ai"
LOAD_TIMEOUT_S = 300.0
CHECK_LOG = "inspect-check.log"


class InspectJob(NamedTuple):
    """What the program is told. Its key comes as a variable."""

    task: str
    """FILE@TASK with the file's whole path, or PACKAGE/TASK."""
    base_url: str = ""
    """Of the gateway; empty: the task is only loaded."""
    limit: int = 0
    """Questions: the first ones of the task."""
    epochs: int = 1
    """Answers to each question."""
    temperature: float = 0.0
    max_tokens: int = 0
    max_connections: int = 1
    log_dir: str = ""
    result: str = ""
    """Path of the file that it writes at its end."""


def interpreter() -> Path:
    """Raises ValueError where there is no inspect-ai."""
    python = settings().inspect_python
    if not python.exists() or installed(python, "", PACKAGE) is None:
        raise ValueError(
            f"{python} has no inspect-ai: `python3 infra/setup/bootstrap.py --inspect` makes its environment (RATCHET_INSPECT_PYTHON names another)"
        )
    return python


def named(task: str) -> str:
    """The task as the program finds it: of a file the whole path. Raises ValueError for a file that does not exist, and one without a task."""
    file, sign, name = task.partition("@")
    if not file.endswith(".py"):
        return task
    if not name:
        raise ValueError(f"inspect task {task!r}: name one task of the file, {file}@TASK")
    path = Path(os.path.expanduser(file)).absolute()
    if not path.is_file():
        raise ValueError(f"inspect task {task!r}: there is no file {path}")
    return f"{path}{sign}{name}"


def source_of(task: str) -> str:
    """Digest what decides a task's questions and scores: its file with the modules beside it that it imports, or the version of its package, and
    the version of inspect-ai."""
    file, package = Path(named(task).partition("@")[0]), task.partition("/")[0]
    of_file = code_digest.digest_of_foreign("<file>", file, file.parent) if file.is_file() else ""
    return f"{of_file or f'{task} {_version_of(package)}'} inspect-ai {_version_of(PACKAGE)}"


def _version_of(package: str) -> str:
    found = installed(settings().inspect_python, "", package)
    return found.version if found else "missing"


def check(task: str, log: Path) -> None:
    """Load a task. Raises ValueError, in one line, for one that cannot be used."""
    _run(InspectJob(named(task)), "", log, LOAD_TIMEOUT_S, ())


def run(spec: InspectJob, api_key: str, log: Path, timeout_s: float, variables: tuple[str, ...]) -> dict[str, Any]:  # Any: JSON
    """Run a task to its end; return what the program's result holds.

    variables: Names of further variables that it gets, as in reward.environment.

    Raises:
        ValueError: in one line, if the task fails.
        EvaluationLost: if the program was killed, or was not done in time.
    """
    Path(spec.result).unlink(missing_ok=True)
    _run(spec, api_key, log, timeout_s, variables)
    found: dict[str, Any] = read_json(Path(spec.result))
    return found


def _run(spec: InspectJob, api_key: str, log: Path, timeout_s: float, variables: tuple[str, ...]) -> None:
    command = [str(interpreter()), "-P", program.__file__, json.dumps(spec._asdict())]
    said: list[str] = [""]
    try:
        children.run(
            command,
            log,
            timeout_s=timeout_s,
            env={"OPENAI_API_KEY": api_key},
            cwd=log.parent,
            on_line=lambda line: said.append(line) if line.strip() else None,
            inherits=child_environment.of_rewards(variables),
        )
    except ProgramTimedOut as error:
        raise EvaluationLost(
            f"inspect task {spec.task!r} was not done after evaluation.inspect_timeout_s {timeout_s:g}"
        ) from error
    except ProgramFailed as error:
        if error.exit_code == program.BAD_TASK:
            raise ValueError(f"inspect task {spec.task!r}: {said[-1]:.500} (all that it said is in {log})") from None
        raise EvaluationLost(
            f"the program of inspect task {spec.task!r} ended with {error.exit_code}; {said[-1]:.200}, see {log}"
        ) from None
