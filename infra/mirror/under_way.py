"""Copy the samples of steps that the store does not have yet to RATCHET_STORE_URL, at intervals, so that another machine need not sample them again.

    RUN/under-way/index.json        names the files with their digests; replaced by each copy
    RUN/under-way/<SHA-256>         a file's content; removed when no index names it any more

A thread of the step's process does it, and no step waits for it. A journal is copied up to its last complete line. Samples whose inputs key
does not fit are quarantined when they are opened, as after a crash: a copy can be older than the step, but never wrong.
"""

import hashlib
import logging
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.mirror import copying
from infra.mirror.copies import BEGINNING, beginning, step_part
from infra.mirror.copying import AnotherRun
from infra.mirror.remote import Remote, RemoteError
from infra.records import File, Record
from infra.settings import settings
from infra.store.files import read_note, run_id, write, write_json
from infra.store.layout import RunFolder, StepFolder, Workspace

log = logging.getLogger(__name__)

FOLDER = "under-way"
LAST_COPY_S = 5.0
"""Seconds that a committed step waits at most until its copy is removed, if there was one."""


class UnderWay(Record):
    """The content of the index."""

    run: str
    run_id: str
    writer: str
    """Id of the workspace that wrote it."""
    files: tuple[File, ...]


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
    files = tuple(_record(path, data) for path, data in content)
    if not files:
        if there is not None:
            remote.remove(_index(run))
            _remove_unnamed(remote, run, ())
        return 0
    for file, (_, data) in zip(files, content, strict=True):
        if remote.num_bytes(_object(run, file)) != file.num_bytes:
            remote.replace(_object(run, file), data)
    index = UnderWay(run=run, run_id=run_id(run), writer=_own_id(), files=files)
    remote.replace(_index(run), index.model_dump_json(indent=1).encode())
    _remove_unnamed(remote, run, files)
    return len(files)


def snapshot(run: str, copied: Collection[str]) -> list[tuple[Path, bytes]]:
    """Return the files of a run's steps that the store does not have, as far as they hold samples.

    copied: Names of the parts that the store has. A step that is committed and not copied yet would be lost with its machine.
    """
    steps = [path for path in sorted(RunFolder.of(run).steps.glob("[0-9]*")) if step_part(int(path.name)) not in copied]
    folders = [folder for step in steps for folder in (step, *sorted((step / "draws").glob("[0-9]*")))]
    found = [each for folder in folders for each in _of_folder(StepFolder(folder))]
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


def _remove_committed(remote: Remote, run: str, copied: Collection[str]) -> None:
    there = read_under_way(remote, run)
    steps = [int(Path(file.path).parts[3]) for file in there.files if Path(file.path).parts[2] == "steps"] if there else []
    if steps and all(step_part(step) in copied for step in steps):
        remote.remove(_index(run))
        _remove_unnamed(remote, run, ())


def _of_folder(folder: StepFolder) -> list[tuple[Path, bytes]]:
    # Journals first: one that is gone by now has become the finished rollout that is read next.
    journals = (folder.journal, folder.turns_journal, folder.episodes_journal)
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


def fetch_under_way(remote: Remote, run: str, num_committed: int, staging: Path) -> None:
    """Bring the samples of steps that the store does not have as committed into a workspace's folder: all of them or, with a warning, none.

    num_committed: Number of the run's next step.
    """
    try:
        there = read_under_way(remote, run)
        if there is None:
            return
        needed = [file for file in there.files if _is_needed(file, run, num_committed)]
        content = {file: remote.read(_object(run, file), file.num_bytes) for file in needed}
    except (RemoteError, ValueError) as error:
        log.warning("the samples of the step under way of run %s cannot be fetched, they are made again: %s", run, error)
        return
    for file, data in content.items():
        if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
            log.warning("the store's copy of %s is not whole: the samples of the step under way are made again", file.path)
            return
    for file, data in content.items():
        write(staging / file.path, data or b"")
    write_json(staging / "runs" / run / RunFolder.of(run).fetched_from.name, FetchedFrom(writer=there.writer).model_dump())
    log.info("%d files of the step under way of run %s fetched", len(content), run)


def _is_needed(file: File, run: str, num_committed: int) -> bool:
    """Whether a file of the copy belongs to a step that is not committed, or to the beginning of a run without one."""
    place = Path(file.path).relative_to(RunFolder.of(run).path.relative_to(settings().workspace)).parts
    return int(place[1]) >= num_committed if place[0] == RunFolder.of(run).steps.name else not num_committed


def read_under_way(remote: Remote, run: str) -> UnderWay | None:
    """Raises ValueError for an index that this version cannot read."""
    content = remote.read(_index(run))
    return None if content is None else UnderWay.model_validate_json(content)


def _check_ours(remote: Remote, there: UnderWay, run: str) -> None:
    fetched = read_note(RunFolder.of(run).fetched_from, FetchedFrom)
    if there.writer != _own_id() and (fetched is None or fetched.writer != there.writer):
        raise AnotherRun(
            f"{remote.url} has the step under way of run {run!r} as another machine makes it: stop this run, and go on where it is now"
        )


def _own_id() -> str:
    """The id of this workspace as a writer."""
    path = Workspace.here().store_writer
    if (known := read_note(path, str)) is None:
        write_json(path, known := uuid.uuid4().hex)
    return known


def _remove_unnamed(remote: Remote, run: str, files: tuple[File, ...]) -> None:
    named = {_index(run), *(_object(run, file) for file in files)}
    for name in (f"{run}/{FOLDER}/{each}" for each in remote.names(f"{run}/{FOLDER}")):
        if name not in named:
            remote.remove(name)


def _index(run: str) -> str:
    return f"{run}/{FOLDER}/index.json"


def _object(run: str, file: File) -> str:
    return f"{run}/{FOLDER}/{file.sha256}"


def _record(path: Path, data: bytes) -> File:
    return File(
        path=path.relative_to(settings().workspace).as_posix(), sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data)
    )
