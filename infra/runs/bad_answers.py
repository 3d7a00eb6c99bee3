"""Wrong answers of an engine, saved in the step's folder so that their cause can be found."""

from collections.abc import Iterator
from contextlib import contextmanager

from infra.failures import WrongAnswer
from infra.store.files import write_json
from infra.store.layout import StepFolder


@contextmanager
def save_bad_answer(run: str, step: int, verb: str) -> Iterator[None]:
    """Write the evidence of a WrongAnswer to a file of the step, and name the file in the error."""
    try:
        yield
    except WrongAnswer as error:
        folder = StepFolder.at(run, step).bad_answers
        number = len(list(folder.glob(f"{verb}-*.json"))) if folder.exists() else 0
        path = write_json(folder / f"{verb}-{number}.json", {"error": str(error), "evidence": error.evidence})
        error.args = (f"{error}; the evidence is in {path}",)
        raise
