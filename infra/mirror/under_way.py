"""Copy the samples of steps that the store does not have yet to RATCHET_STORE_URL, at intervals, so that another machine need not sample them
again, and what their judges were paid for.

    RUN/under-way/index.json        names the files with their digests, and the pieces of each; replaced by each copy
    RUN/under-way/<SHA-256>         a piece: what was new in a file at one copy; removed when no index names it any more

A thread of the step's process does it, and no step waits for it. A journal is copied up to its last complete line. Samples whose inputs key
does not fit are quarantined when they are opened, as after a crash: a copy can be older than the step, but never wrong.
"""

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.mirror import copying
from infra.mirror.copies import BEGINNING, beginning, evaluation_part, is_of, step_part
from infra.mirror.copying import AnotherRun
from infra.mirror.paid import paid_under_way
from infra.mirror.remote import Remote, RemoteError, Unreadable
from infra.records import File, Record
from infra.settings import settings
from infra.store.files import read_note, run_id, write, write_json
from infra.store.layout import RunFolder, StepFolder, Workspace

log = logging.getLogger(__name__)

FOLDER = "under-way"
LAST_COPY_S = 5.0
"""Seconds that a committed step waits at most until its copy is removed, if there was one."""
AT_WORK_S = 120.0
"""A copy that is younger is of a machine that may still be at work."""
MAX_PIECES = 64
"""Of a file; with more it is sent as a whole again. A journal that is copied so often has grown by that much."""


class CopiedPiece(Record):
    sha256: str
    num_bytes: int


class CopiedFile(File):
    pieces: tuple[CopiedPiece, ...] = ()
    """Its content, in their order; empty, as earlier versions wrote it: one piece."""

    @property
    def content(self) -> tuple[CopiedPiece, ...]:
        return self.pieces or (CopiedPiece(sha256=self.sha256, num_bytes=self.num_bytes),)


class UnderWay(Record):
    """The content of the index."""

    run: str
    run_id: str
    writer: str
    """Id of the workspace that wrote it."""
    at: float = 0.0
    """When, in seconds since the epoch, by that machine's clock."""
    files: tuple[CopiedFile, ...]


class FetchedFrom(Record):
    """The content of a run's fetched.json."""

    writer: str
    """Id of the workspace whose samples were fetched: its copy may be replaced."""


@contextmanager
def copied_under_way(run: str) -> Iterator[None]:
    """Copy what is under way of a run while the block runs, every RATCHET_STORE_EVERY_S seconds; nothing where no store is configured."""
    url, every_s = settings().store_url, settings().store_every_s
    if url is None or not every_s:
        yield
        return
    copier = _Copier(url, run, every_s)
    copier.start()
    try:
        yield
    except BaseException:
        copier.ended.set()  # the last copy stays: the step goes on from it
        raise
    copier.ended.set()
    if copier.has_copied and not copier.has_failed:  # a store that is away is not waited for
        copier.join(LAST_COPY_S)


class _Copier(threading.Thread):
    def __init__(self, url: str, run: str, every_s: float) -> None:
        super().__init__(daemon=True, name=f"copies of run {run}")
        self.url, self.run_name, self.every_s = url, run, every_s
        self.ended = threading.Event()
        self.has_copied = self.has_failed = False

    def run(self) -> None:
        try:
            while not self.ended.wait(self.every_s):
                self._copy()
            if self.has_copied:
                self._copy()  # the step is committed: its copy goes, or holds the finished rollout until the step itself is copied
        except AnotherRun as error:
            log.error("%s", error)
        except Exception:  # of a store's library: the step does not need the copy
            log.exception("the step under way of run %s is not copied any more", self.run_name)

    def _copy(self) -> None:
        try:
            copy_under_way(Remote(self.url), self.run_name)
            self.has_copied, self.has_failed = True, False
        except RemoteError as error:
            if not self.has_failed:
                log.warning(
                    "the step under way of run %s is not copied, the next attempt is in %g s: %s",
                    self.run_name,
                    self.every_s,
                    error,
                )
            self.has_failed = True


def copy_under_way(remote: Remote, run: str) -> int:
    """Copy the samples of steps that the store does not have. Returns the number of files; where there are none, an earlier copy is removed.

    Raises:
        AnotherRun: where another machine has continued the run. RemoteError: where the store does not take all of it; the last copy is whole.
    """
    there = read_under_way(remote, run)
    if there is not None:
        _check_ours(remote, there, run)
    content = snapshot(run, copying.copied_parts(run, remote.url))
    if not content:
        if there is not None:
            remote.remove(_index(run))
            _remove_unnamed(remote, run, ())
        return 0
    before = {file.path: file for file in there.files} if there is not None else {}
    names = frozenset(remote.names(f"{run}/{FOLDER}"))
    files = tuple(_copied_file(remote, run, path, data, before, names) for path, data in content)
    index = UnderWay(run=run, run_id=run_id(run), writer=_own_id(), at=time.time(), files=files)
    remote.replace(_index(run), index.model_dump_json().encode())
    _remove_unnamed(remote, run, files)
    return len(files)


def _copied_file(
    remote: Remote, run: str, path: Path, data: bytes, before: Mapping[str, CopiedFile], names: frozenset[str]
) -> CopiedFile:
    """Bring what is new of a file into the store.

    before: The files of the last copy, by path. names: Of the pieces that are there.
    """
    record = _record(path, data)
    old = before.get(record.path)
    pieces = old.content if old is not None and _goes_on(data, old) and {each.sha256 for each in old.content} <= names else ()
    begin = sum(piece.num_bytes for piece in pieces)
    if new := data[begin:]:
        piece = CopiedPiece(sha256=hashlib.sha256(new).hexdigest(), num_bytes=len(new))
        if remote.num_bytes(_object(run, piece)) != piece.num_bytes:
            remote.replace(_object(run, piece), new)
        pieces = (*pieces, piece)
    return CopiedFile(**record.model_dump(), pieces=pieces)


def _goes_on(data: bytes, old: CopiedFile) -> bool:
    """Whether a file's content only has more at its end than at the last copy. It is sent as a whole where it has too many pieces."""
    if old.num_bytes < len(data) and len(old.content) >= MAX_PIECES:
        return False
    return old.num_bytes <= len(data) and hashlib.sha256(memoryview(data)[: old.num_bytes]).hexdigest() == old.sha256


def snapshot(run: str, copied: Collection[str]) -> list[tuple[Path, bytes]]:
    """Return the files of a run's steps that the store does not have, as far as they hold samples, and the paid answers of judges.

    copied: Names of the parts that the store has. A step that is committed and not copied yet would be lost with its machine.
    """
    steps = [path for path in sorted(RunFolder.of(run).steps.glob("[0-9]*")) if step_part(int(path.name)) not in copied]
    folders = [folder for step in steps for folder in (step, *sorted((step / "draws").glob("[0-9]*")))]
    found = [each for folder in folders for each in _of_folder(StepFolder(folder))] + paid_under_way(run, copied)
    if not found or BEGINNING in copied:
        return found
    return [(path, data) for path in beginning(run) if (data := _content(path))] + found


def copy_run(run: str) -> bool:
    """Copy what is committed of a run, as copying.copy_run does, and remove a copy of samples of which all steps are there."""
    if not copying.copy_run(run):
        return False
    url = settings().store_url
    if url is not None:
        try:
            _remove_committed(Remote(url), run, copying.copied_parts(run, url))
        except (RemoteError, ValueError) as error:
            log.info("the copy of samples of run %s stays in the store: %s", run, error)
    return True


def _remove_committed(remote: Remote, run: str, copied: frozenset[str]) -> None:
    there = read_under_way(remote, run)
    needed = {part for file in there.files if (part := _part_of(file))} if there else set()
    if needed and needed <= copied:
        remote.remove(_index(run))
        _remove_unnamed(remote, run, ())


def _of_folder(folder: StepFolder) -> list[tuple[Path, bytes]]:
    # Journals first: one that is gone by now has become the finished rollout that is read next.
    journals = (folder.journal, folder.turns_journal, folder.episodes_journal, folder.scores_journal)
    found = {path: data[: data.rfind(b"\n") + 1] for path in journals if (data := _content(path))}
    note = read_note(folder.samples_inputs, dict[str, Any])
    written = (folder.samples, folder.left_over, folder.left_over_episodes)
    samples = {path: data for path in written if note is not None and (data := _content(path))}
    named = [note["file"], *([note["left_over"]["samples"]] if note.get("left_over") else [])] if note else []
    digests = {hashlib.sha256(data).hexdigest() for data in samples.values()}
    if note is not None and {each["sha256"] for each in named} <= digests:  # else it was written again meanwhile
        found |= samples | {folder.samples_inputs: _content(folder.samples_inputs) or b""}
    return [(path, data) for path, data in found.items() if data]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def fetch_under_way(remote: Remote, run: str, copied: Collection[str], staging: Path) -> None:
    """Bring the samples of steps that the store does not have as committed into a workspace's folder: all of them or, with a warning, none.

    copied: Names of the parts that the store has.

    Raises:
        RemoteError: where the store does not answer.
    """
    try:
        there = read_under_way(remote, run)
    except Unreadable as error:
        log.warning("the samples of the step under way of run %s cannot be fetched, they are made again: %s", run, error)
        return
    if there is None:
        return
    _warn_if_at_work(there)
    write_json(_in(staging, RunFolder.of(run).fetched_from), FetchedFrom(writer=there.writer).model_dump())
    needed = [file for file in there.files if is_of(run, file.path) and (_part_of(file) or BEGINNING) not in copied]
    content = {file: _joined(remote, run, file) for file in needed}
    for file, data in content.items():
        if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
            log.warning("the store's copy of %s is not whole: the samples of the step under way are made again", file.path)
            return
    for file, data in content.items():
        write(staging / file.path, data or b"")
    log.info("%d files of the step under way of run %s fetched", len(content), run)


def _in(staging: Path, path: Path) -> Path:
    """Where a file of this workspace lies in a folder that is made like one."""
    return staging / path.relative_to(Workspace.here().path)


def _warn_if_at_work(there: UnderWay) -> None:
    age_s = time.time() - there.at
    if there.writer != _own_id() and age_s < AT_WORK_S:
        log.warning(
            "another machine copied run %s %.0f s ago: if it still makes it, stop it there, for one of the two machines will be stopped",
            there.run,
            max(0.0, age_s),
        )


def _joined(remote: Remote, run: str, file: CopiedFile) -> bytes | None:
    """The content of a file; None where a piece is missing."""
    pieces = [remote.read(_object(run, piece), piece.num_bytes) for piece in file.content]
    return None if None in pieces else b"".join(piece for piece in pieces if piece)


def _part_of(file: File) -> str:
    """Name the part that has a file of the copy once it is complete; empty for the beginning of a run."""
    _, _, kind, *place = Path(file.path).parts  # runs/RUN/steps/000003/...
    folder = RunFolder.of("")
    if kind == folder.steps.name:
        return step_part(int(place[0]))
    return evaluation_part(place[0]) if kind == folder.evaluations.name else ""


def read_under_way(remote: Remote, run: str) -> UnderWay | None:
    """Raises Unreadable for an index that this version cannot read."""
    content = remote.read(_index(run))
    try:
        return None if content is None else UnderWay.model_validate_json(content)
    except ValidationError as error:
        raise Unreadable(f"{remote.url}/{_index(run)} is no index that this version of Ratchet can read") from error


def check_writer(remote: Remote, run: str) -> None:
    """Raises AnotherRun where another machine has copied the step under way of a run."""
    if (there := read_under_way(remote, run)) is not None:
        _check_ours(remote, there, run)


def _check_ours(remote: Remote, there: UnderWay, run: str) -> None:
    fetched = read_note(RunFolder.of(run).fetched_from, FetchedFrom)
    if there.writer != _own_id() and (fetched is None or fetched.writer != there.writer):
        raise copying.made_elsewhere(remote, run, f"the step under way of run {run!r} as another machine makes it")


def _own_id() -> str:
    """The id of this workspace as a writer."""
    path = Workspace.here().store_writer
    if (known := read_note(path, str)) is None:
        write_json(path, known := uuid.uuid4().hex)
    return known


def _remove_unnamed(remote: Remote, run: str, files: tuple[CopiedFile, ...]) -> None:
    named = {_index(run), *(_object(run, piece) for file in files for piece in file.content)}
    for name in (f"{run}/{FOLDER}/{each}" for each in remote.names(f"{run}/{FOLDER}")):
        if name not in named:
            remote.remove(name)


def _index(run: str) -> str:
    return f"{run}/{FOLDER}/index.json"


def _object(run: str, piece: CopiedPiece) -> str:
    return f"{run}/{FOLDER}/{piece.sha256}"


def _record(path: Path, data: bytes) -> File:
    return File(
        path=path.relative_to(settings().workspace).as_posix(), sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data)
    )
