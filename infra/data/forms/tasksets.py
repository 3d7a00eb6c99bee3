"""Tasks of a taskset of verifiers as rows: the data source `verifiers:ID`. A program in verifiers' own environment lists them."""

import json
import tempfile
from pathlib import Path

from infra.config.sections.environments.taskset import path_of
from infra.data.forms.local_files import Table, read_tables
from infra.processes import child_environment, children
from infra.processes.children import ProgramFailed, ProgramTimedOut
from infra.progress import work as progress
from infra.settings import CHECKOUT, settings
from infra.store.digests import sha256_of
from infra.store.layout import Workspace

PROGRAM = CHECKOUT / "infra/environments/verifiers_tasks/listing.py"
BAD_TASKSET = 64
"""Its exit code for a taskset that cannot be listed."""
PACKAGE = "verifiers"
LIST_TIMEOUT_S = 600.0
MAX_TASKS = 4096
"""Tasks that are taken of a taskset: the first ones. Some have no end."""
LOG = "taskset.log"


def interpreter() -> Path:
    """Raises ValueError where there is no verifiers."""
    python = settings().verifiers_python
    if not python.exists() or not _folders(python, f"{PACKAGE}-*.dist-info"):
        raise ValueError(
            f"{python} has no verifiers: `python3 infra/setup/bootstrap.py --verifiers` makes its environment (RATCHET_VERIFIERS_PYTHON names "
            "another)"
        )
    return python


def table_of(taskset: str) -> Table:
    """List a taskset.

    Raises:
        ValueError: in one line, for one that cannot be listed.
    """
    check(taskset)
    python, said = interpreter(), [""]
    with tempfile.TemporaryDirectory() as folder, progress.work(f"listing the taskset {taskset}"):
        file = Path(folder) / "tasks.jsonl"
        try:
            children.run(
                [str(python), str(PROGRAM), taskset, str(MAX_TASKS), str(file)],
                Workspace.here().logs / LOG,
                timeout_s=LIST_TIMEOUT_S,
                on_line=lambda line: said.append(line) if line.strip() else None,
                inherits=child_environment.of_rewards(()),
            )
        except ProgramTimedOut as error:
            raise ValueError(
                f"taskset {taskset!r} was not listed in {LIST_TIMEOUT_S:g} s: is it waiting for a network?"
            ) from error
        except ProgramFailed as error:
            raise ValueError(f"taskset {taskset!r} cannot be listed: {said[-1]:.500}") from error
        if not file.read_bytes():
            raise ValueError(f"taskset {taskset!r} has no tasks")
        (found,) = read_tables(file, "train")
    return Table(f"taskset {taskset!r}", found.columns)


def check(taskset: str) -> None:
    """Raises ValueError for a path at which there is no taskset."""
    path = path_of(taskset)
    if path and not (path / "__init__.py").is_file() and not (path.suffix == ".py" and path.is_file()):
        raise ValueError(f"taskset {taskset!r}: {path} is no Python package (a folder with __init__.py) and no .py file")


def source_digest(taskset: str) -> str:
    """Digest what decides a taskset's tasks, turns and rewards: its files, and the versions of verifiers and of its own distribution."""
    python, path = settings().verifiers_python, path_of(taskset)
    name = taskset.replace("-", "_").lower()
    places = [path] if path else [*_folders(python, name), *_folders(python, f"{name}.py")]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    versions = [found.name for kind in (PACKAGE, name) for found in _folders(python, f"{kind}-*.dist-info")]
    return json.dumps([*versions, *map(sha256_of, files)])


def _folders(python: Path, pattern: str) -> list[Path]:
    return sorted(python.parent.parent.glob(f"lib/python*/site-packages/{pattern}"))
