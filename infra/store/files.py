"""Files of the workspace: written atomically, checked when read. infra.store.layout defines where they are."""

import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr, TypeAdapter, ValidationError

from infra.records import AdapterVersion, File
from infra.settings import settings
from infra.store import exchange
from infra.store.digests import sha256_of, stamp_of
from infra.store.layout import ID, REMOVED, Workspace, run_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

LAYOUT_VERSION = 3


class DigestMismatch(RuntimeError):
    """A file has changed since its record was made."""


class Removed(DigestMismatch):
    """A file of an adapter was removed on purpose, by the run's retention."""


def new_id(folder: Path) -> None:
    """Give this folder's run or step a new id. It distinguishes it from an earlier one of the same name whose folder was removed."""
    write_json(folder / ID, uuid.uuid4().hex)


def id_of(folder: Path) -> str:
    """Return the id of a run or step; empty if it has not started."""
    return read_record(folder / ID, str, cure="put it back") if (folder / ID).exists() else ""


def run_id(run: str) -> str:
    """Return the id of a run; empty if it has not started."""
    return id_of(run_folder(run))


def path_of(file: File) -> Path:
    """Return where a recorded file lies, in this workspace. Its content is not checked: see `verified`."""
    return settings().workspace / file.path


def record_of(path: Path) -> File:
    """Return the record of a file in the workspace: of one content, also while another process replaces it."""
    relative = path.relative_to(settings().workspace).as_posix()
    stamp, sha256 = stamp_of(path), sha256_of(path)
    while (now := stamp_of(path)) != stamp:
        stamp, sha256 = now, sha256_of(path)
    return File(path=relative, sha256=sha256, num_bytes=stamp.num_bytes)


def verified(file: File) -> Path:
    """Return the path of a recorded file.

    Raises:
        DigestMismatch: if it is missing, truncated or changed; names the file.
    """
    path = path_of(file)
    if not path.is_file():
        if any((folder / REMOVED).exists() for folder in path.parents[:2]):
            raise Removed(
                f"{path} was removed by the run's retention, what needs it cannot be done any more: keep more in the configuration's section "
                "`retention`, or make the step that made it again"
            )
        raise DigestMismatch(f"{path} is missing; it was recorded with SHA-256 {file.sha256}")
    if (found := sha256_of(path)) != file.sha256:
        raise DigestMismatch(
            f"{path} has changed since it was written: {path.stat().st_size} bytes with SHA-256 {found}, "
            f"recorded were {file.num_bytes} bytes with {file.sha256}"
        )
    return path


def verified_adapter(adapter: AdapterVersion) -> Path:
    """Return the folder of an adapter whose weights and adapter_config.json match their records.

    Raises:
        DigestMismatch: if one is missing or changed; names the file.
    """
    assert adapter.weights is not None
    for file in (adapter.weights, adapter.adapter_config):
        if file is not None:
            verified(file)
    return path_of(adapter.weights).parent


def verified_for_engine(adapter: AdapterVersion) -> Path:
    """Return the folder of an adapter with stacked experts, if it has one whose files match their records; else as `verified_adapter`.

    A stacked copy that is missing or changed is left out with a warning: it is not synced to the disk, and retention removes it.
    """
    if adapter.engine_weights is not None and adapter.adapter_config is not None:
        path = path_of(adapter.engine_weights)
        files = {path: adapter.engine_weights.sha256, path.with_name("adapter_config.json"): adapter.adapter_config.sha256}
        if all(file.is_file() and sha256_of(file) == sha256 for file, sha256 in files.items()):
            return path.parent
        log.warning("adapter %d: %s is not as it was written, the weights beside it are loaded instead", adapter.version, path)
    return verified_adapter(adapter)


def folder_of_user(name: str, path: str | Path) -> Path:
    """Return a folder to write to as a user named it, `~` expanded. Raises ValueError for another user's that is not known; else the folder
    `~name` would be made where the command runs."""
    if (found := os.path.expanduser(path)).startswith("~"):
        raise ValueError(
            f"{name} {found!r}: there is no user {found[1:].partition('/')[0]!r} here; give a folder such as /data/mine"
        )
    return Path(found).absolute()


def write(path: Path, data: bytes, *, syncs: bool = True) -> Path:
    """Write a file atomically. It is on the disk when this returns; without syncs, as in `write_by`.

    Raises:
        OSError: if it cannot be written; names the file. An existing file is untouched.
    """

    def fill(partial: Path) -> None:
        with partial.open("xb") as stream:  # a new file: an existing link is not followed
            stream.write(data)

    write_by(fill, path, what=f"{len(data)} bytes", syncs=syncs)
    return path


def write_by(fill: Callable[[Path], object], path: Path, *, what: str, syncs: bool = True) -> Path:
    """Like `write`, for a library that writes files itself. fill: Writes the file at a given path. what: For messages. Without syncs, the file
    survives the end of this process when this returns, but not yet a power cut. Raises OSError, with the path in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.unlink(missing_ok=True)
        fill(partial)
        if syncs:
            sync(partial)
            partial.replace(path)
        else:
            exchange.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {what} for {path}") from error
    finally:
        partial.unlink(missing_ok=True)
    if syncs:
        sync(path.parent)
    return path


def write_secret(path: Path, secret: SecretStr) -> Path:
    """Write a file atomically that only this user can read, from its first byte on."""

    def fill(partial: Path) -> None:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secret.get_secret_value())

    return write_by(fill, path, what="a secret")


def read_secret(path: Path) -> SecretStr:
    """Read a file of `write_secret`."""
    return SecretStr(path.read_text())


def write_json(path: Path, value: Any, *, syncs: bool = True) -> Path:  # Any: JSON
    """Write a value as JSON with sorted keys, as `write` does."""
    return write(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n", syncs=syncs)


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]], *, syncs: bool = True) -> Path:
    """Write rows as lines of JSON with sorted keys, as `write` does."""
    return write(path, b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows), syncs=syncs)


def read_json(path: Path) -> Any:  # Any: JSON
    """Read JSON. Raises ValueError for a file that does not contain JSON; names it."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: it is no JSON ({error})") from error


def write_note(path: Path, value: Any) -> Path:
    """Write JSON that a power cut makes obsolete (a running process), that is not essential (seconds), or that a step's commit syncs. It does
    not wait for the disk, which is slow while an adapter's gigabytes are being written. A reader must be able to continue if the note is lost."""
    return write_json(path, value, syncs=False)


def read_note(path: Path, form: type[T]) -> T | None:
    """Read a note that can be made again; None if there is none. A note that is truncated or has another form is moved aside, with a warning.

    form: A model, or a type such as dict[str, float].
    """
    try:
        return TypeAdapter(form).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        aside = path.with_name(f"{path.name}.odd")
        with suppress(FileNotFoundError):
            path.replace(aside)
        log.warning("%s is set aside as %s and counts as not written: %s", path, aside.name, _said_by(error))
        return None


def read_record(path: Path, form: type[T], *, cure: str) -> T:
    """Read a record that cannot be made again.

    cure: What the user can do if it is damaged.

    Raises:
        ValueError: for a file that is truncated or has another form; one line that names it.
    """
    try:
        return TypeAdapter(form).validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} cannot be read: {_said_by(error)}; {cure}") from error


def _said_by(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read all lines of a file of JSON lines. Raises ValueError for a line that is no JSON; names it."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: line {number} is no JSON ({error})") from error
    return found


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make all files in a folder durable."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def publish_folder(staging: Path, target: Path, *, syncs: bool = True) -> None:
    """Move a finished folder to its final name in one rename. An unfinished folder there is replaced. Without syncs, its files and its name may
    be lost in a power cut until `sync_folder`, and `sync` of the folder above it, are called: a reader has to check their digests."""
    if syncs:
        sync_folder(staging)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    staging.rename(target)
    if syncs:
        sync(target.parent)


PRIVATE = 0o700
"""Mode of a folder that only its user can enter."""


def fresh_folder(path: Path, mode: int = 0o777) -> Path:
    """Make an empty folder. Leftovers of a failed attempt are removed. mode: As for os.mkdir."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=mode, parents=True)
    return path


@contextmanager
def only_maker(path: Path) -> Iterator[None]:
    """Let only one process at a time make this file or folder; others wait.

    The lock file lies next to it, and the kernel frees the lock however its holder ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for the process that is making %s", path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def usable_workspace() -> Path:
    """Make the workspace's folder if it is missing.

    Raises:
        ValueError: if it cannot be made or written to.
    """
    root = settings().workspace
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write there")
    except OSError as error:
        raise ValueError(
            f"workspace {root} cannot be used: {error.strerror}; set RATCHET_WORKSPACE to a folder that you may write to"
        ) from error
    return root


def open_workspace() -> Path:
    """Create the workspace, or make sure that this version of Ratchet can use it.

    Raises:
        ValueError: for a workspace of another layout, one with too little room, or one that cannot be made or written to.
    """
    root = usable_workspace()
    marker = Workspace(root).layout_version
    if not marker.exists():
        write_json(marker, {"layout": LAYOUT_VERSION})
    cure = f'if the folder is a workspace of this version, write {{"layout": {LAYOUT_VERSION}}} into it'
    found = read_record(marker, dict[str, int], cure=cure).get("layout")
    if found != LAYOUT_VERSION:
        raise ValueError(
            f"workspace {root} has layout {found}, this version of Ratchet uses layout {LAYOUT_VERSION}: "
            "set RATCHET_WORKSPACE to another folder, or use the version that made it"
        )
    free = shutil.disk_usage(root).free / 2**30
    if free < settings().min_free_gib:
        raise ValueError(
            f"workspace {root} has {free:.2f} GiB free, a step needs {settings().min_free_gib} GiB (RATCHET_MIN_FREE_GIB): "
            "make room or set RATCHET_WORKSPACE to another disk"
        )
    return root
