"""What the copy of a run holds: an index for each part of the run, which names its files with their digests, and the files' contents.

    RUN/index/step-000003.json      written last: where it is, all that it names is there
    RUN/objects/<SHA-256>           a file's content; two files of equal content share one

A part is the run's beginning, an adapter, a committed step, an evaluation or the report of a finished run. The store keeps all of them, also
adapters that the run's retention removes here.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.records import File, Record
from infra.store.layout import DELIVERED, EVALUATION, ID, MANIFEST, PREFECT_PAGE, REMOVED, RunFolder, Workspace

INDEX, OBJECTS = "index", "objects"
NOT_COPIED = (DELIVERED, PREFECT_PAGE)
"""Files of a part that are about this machine's servers."""
BEGINNING, END = "run", "report"


class Copy(Record):
    """The content of an index file."""

    run: str
    run_id: str
    """Another run of that name has another one."""
    files: tuple[File, ...]


@dataclass(frozen=True)
class Part:
    """A part of a run that can be copied."""

    name: str
    files: tuple[Path, ...]
    is_final: bool
    """Its files are never written again. Of an adapter, retention may remove some."""


def index_name(run: str, part: str) -> str:
    return f"{run}/{INDEX}/{part}.json"


def object_name(run: str, file: File) -> str:
    return f"{run}/{OBJECTS}/{file.sha256}"


def step_part(index: int) -> str:
    return f"step-{index:06d}"


def adapter_part(version: int) -> str:
    return f"adapter-{version:06d}"


def evaluation_part(folder: str) -> str:
    """folder: Name of the evaluation's."""
    return f"evaluation-{folder}"


def step_of(part: str) -> float:
    """Return the number of the step of which a part is: an adapter and its evaluations are of the step that made it. The report is of none, and
    more than any; the beginning is less."""
    kind, _, number = part.partition("-")
    if kind == "step":
        return int(number)
    if kind in ("adapter", "evaluation"):
        return int(number.partition("-")[0]) - 1
    return math.inf if part == END else -1


def parts(run: str) -> list[Part]:
    """The parts of a run on the disk, in the order in which they are copied: an adapter before the step that made it, that one before the
    next. None before the first step is committed."""
    folder = RunFolder.of(run)
    steps = [path.parent for path in sorted(folder.steps.glob(f"[0-9]*/{MANIFEST}"))]
    if not steps:
        return []
    summary = list(folder.summary.path.rglob("*")) if folder.report.exists() else []
    return [
        Part(BEGINNING, beginning(run), is_final=False),
        *_adapters_and_steps(folder, steps),
        *(
            Part(evaluation_part(path.parent.name), _existing(path.parent.rglob("*")), is_final=False)
            for path in sorted(folder.evaluations.glob(f"*/{EVALUATION}"))
        ),
        *([Part(END, _existing([folder.report, *summary]), is_final=False)] if folder.report.exists() else []),
    ]


def beginning(run: str) -> tuple[Path, ...]:
    """The files of a run that are written before its first step."""
    folder = RunFolder.of(run)
    return _existing((folder.config, folder.path / ID, folder.origin, folder.dataset_fingerprint))


def _adapters_and_steps(folder: RunFolder, steps: list[Path]) -> Iterator[Part]:
    """The adapter that step k makes is version k + 1; what is newer belongs to a step that is not committed."""
    versions = sorted(int(path.name) for path in folder.adapters.glob("[0-9]*"))
    for step in steps:
        while versions and versions[0] <= int(step.name) + 1:
            version = versions.pop(0)
            yield Part(adapter_part(version), _existing((folder.adapters / f"{version:06d}").rglob("*")), is_final=True)
        yield Part(step_part(int(step.name)), _existing(step.rglob("*")), is_final=True)


def _existing(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Files that are there, without those of this machine and those that are being written."""
    return tuple(
        path for path in sorted(paths) if path.is_file() and path.name not in NOT_COPIED and not path.name.endswith(".partial")
    )


def is_of(run: str, path: str) -> bool:
    """Whether a file that a store names is in the run's folder; those of a run that was renamed in the store are not."""
    return path.startswith(f"{RunFolder.of(run).path.relative_to(Workspace.here().path)}/")


def manifest_of(copy: Copy) -> str:
    """Return the digest of a step's manifest, by which it is known; empty for other parts."""
    return next((file.sha256 for file in copy.files if file.path.endswith(f"/{MANIFEST}")), "")


def is_same(here: Copy, there: Copy) -> bool:
    """Whether what is here of a final part is what the store has. A step is known by its manifest; of an adapter, retention may have removed
    files on either side."""
    named = {file.path: file for file in there.files}
    decisive = [file for file in here.files if file.path.endswith(f"/{MANIFEST}")] or here.files
    return all(named.get(file.path, file) == file for file in decisive if not file.path.endswith(f"/{REMOVED}"))
