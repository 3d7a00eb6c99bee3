"""What an engine answered wrongly, kept in the step's folder for whoever has to find out why."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.failures import WrongAnswer
from infra.store.files import run_folder, write_json

FOLDER = "evidence"


@contextmanager
def evidence_kept(run: str, step: int, verb: str) -> Iterator[None]:
    """Write what came with a WrongAnswer to a file of the step, and name the file in the error."""
    try:
        yield
    except WrongAnswer as error:
        folder = run_folder(run) / "steps" / f"{step:06d}" / FOLDER
        number = len(list(folder.glob(f"{verb}-*.json"))) if folder.exists() else 0
        path = write_json(folder / f"{verb}-{number}.json", {"error": str(error), "evidence": error.evidence})
        error.args = (f"{error}; the evidence is in {path}",)
        raise
