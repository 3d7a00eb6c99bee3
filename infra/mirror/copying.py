"""Copy what is committed to RATCHET_STORE_URL, in the background: the process that uploads to MLflow does it (infra/tracking/upload.py).

Nothing of a step waits for it. What could not be copied waits on disk. A part is in the store when its index is, which one writer alone
creates: of two machines that continue the same run, the second is told that the run is no longer its own.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from infra.failures import StoreRefused
from infra.mirror.copies import (
    BEGINNING,
    END,
    Copy,
    Part,
    index_name,
    is_same,
    manifest_of,
    object_name,
    parts,
    step_of,
    step_part,
)
from infra.mirror.remote import AddressRefused, Remote, RemoteError, Unreadable
from infra.records import Record
from infra.settings import settings
from infra.store.digests import sha256_of
from infra.store.files import path_of, read_note, record_of, run_id, write_json
from infra.store.layout import RunFolder, Workspace

log = logging.getLogger(__name__)

RECHECK_S = 60.0
"""Seconds for which a process does not check a store again that did not answer: its steps do not wait for it each time."""
_away: dict[str, float] = {}
"""By address: when the last check got no answer, by time.monotonic."""


class Copied(Record):
    """The content of a run's copied.json. It saves questions: without it each part is compared with the store once more."""

    url: str
    parts: dict[str, str]
    """Digest of each part's index, by the part's name."""
    dropped: dict[str, str] = Field(default_factory=dict)
    """Parts that were dropped here and are still in the store. By name: a step's digest of its manifest, else nothing."""


class AnotherRun(StoreRefused):
    """The store has another run of this name, or this run as another machine has continued it."""


def check() -> None:
    """Check RATCHET_STORE_URL, if it is set.

    A store that does not answer is a warning, after remote.CHECK_S at most: one for each time that it goes away.

    Raises:
        StoreRefused: for an address that cannot be used, or keys that are not taken.
    """
    url = settings().store_url
    if url is None or is_away(url):
        return
    try:
        remote = Remote(url)
        remote.check_outside(Workspace.here().path)
        remote.check()
        _away.pop(url, None)
    except AddressRefused as error:
        raise StoreRefused(f"RATCHET_STORE_URL: {error}") from error
    except RemoteError as error:
        if error.is_refusal:
            raise StoreRefused(f"RATCHET_STORE_URL: {error}") from error
        is_told = url in _away
        _away[url] = time.monotonic()
        if not is_told:
            log.warning("RATCHET_STORE_URL: %s; runs go on, their copies wait on disk, and `ratchet upload` makes them", error)


def is_away(url: str) -> bool:
    """Whether a check found a moment ago that the store does not answer."""
    return url in _away and time.monotonic() - _away[url] < RECHECK_S


def waiting(run: str) -> list[Part]:
    """Parts that are not in the store yet, in their order, then those that were dropped here and are still there, without files; none where no
    store is configured."""
    if (url := settings().store_url) is None:
        return []
    copied = _copied(run, url)
    known, dropped = copied.parts, [Part(name, (), is_final=False) for name in copied.dropped]
    return [
        part
        for part in parts(run)
        if part.name not in known or (not part.is_final and known[part.name] != _digest(_copy(run, part)))
    ] + dropped


def write_copied(path: Path, url: str, copies: Mapping[str, Copy]) -> None:
    """Note what a run that was fetched has in the store already, by the parts' names."""
    write_json(path, Copied(url=url, parts={name: _digest(copy) for name, copy in copies.items()}).model_dump())


def copied_parts(run: str, url: str) -> frozenset[str]:
    """Names of the parts that are known to be in the store at this address."""
    return frozenset(_copied(run, url).parts)


def copied_adapters(run: str) -> set[int] | None:
    """Versions of which the store has a copy; None where no store is configured."""
    if (url := settings().store_url) is None:
        return None
    names = (name.partition("-") for name in _copied(run, url).parts)
    return {int(number) for kind, _, number in names if kind == "adapter"}


def num_bytes_waiting(run: str) -> int:
    return sum(path.stat().st_size for part in waiting(run) for path in part.files if path.exists())


def copy_run(run: str) -> bool:
    """Copy what waits of a run. Returns False, with one line in the log, where the store does not take all of it now.

    Raises:
        AnotherRun: where the store has this run as another machine made it.
    """
    missing = waiting(run)
    if not missing:
        return True
    url = str(settings().store_url)
    remote, known = Remote(url), _copied(run, url)
    try:
        if known.dropped:
            _remove_dropped(remote, run, known)
            known = known.model_copy(update={"dropped": {}})
            write_json(RunFolder.of(run).copied, known.model_dump())
        for part in (each for each in missing if each.files):
            copy = _copied_part(remote, run, part)
            known = Copied(url=url, parts={**known.parts, part.name: _digest(copy)})
            write_json(RunFolder.of(run).copied, known.model_dump())
    except RemoteError as error:
        log.warning("run %s is not copied: %s", run, error)
        return False
    except FileNotFoundError as gone:  # retention removed it meanwhile
        log.info("run %s is copied once more: %s", run, gone)
        return False
    log.info("run %s is copied to %s", run, url)
    return True


def note_dropped(run: str, step: int) -> None:
    """Note that the steps of a run from `step` on are being dropped here. What the store has of them is removed there before anything else is
    copied: steps that are made again would not be copied else, and a machine that continues the run would get the old ones.

    The store may have more of them than copied.json says, if a copy was interrupted or that file was lost.
    """
    url = settings().store_url
    noted = read_note(RunFolder.of(run).copied, Copied) or (Copied(url=url, parts={}) if url else None)
    if noted is None:
        return
    gone = {name: "" for name in noted.parts if step_of(name) >= step}
    gone |= {part.name: manifest_of(_copy(run, part)) for part in parts(run) if step_of(part.name) >= step}
    kept = {name: digest for name, digest in noted.parts.items() if name not in gone}
    write_json(RunFolder.of(run).copied, Copied(url=noted.url, parts=kept, dropped=noted.dropped | gone).model_dump())


def _remove_dropped(remote: Remote, run: str, known: Copied) -> None:
    """Remove the indices of dropped parts, the last one first: until the first is removed, the store has a run that is whole up to some step.
    Objects stay. Raises AnotherRun where another machine has continued the run, or made one of these steps again."""
    after = max((int(step_of(name)) + 1 for name in known.dropped if name != END), default=None)
    if after is not None and there(remote, index_name(run, step_part(after))) is not None:
        raise made_elsewhere(remote, run, f"{step_part(after)} of run {run!r} as another machine made it")
    for name in sorted(known.dropped, key=lambda name: (step_of(name), name), reverse=True):
        stored = there(remote, index_name(run, name))
        if stored is None:
            continue
        _check_id(remote, run, stored)
        if manifest_of(stored) != known.dropped[name]:
            raise made_elsewhere(remote, run, f"{name} of run {run!r} as another machine made it")
        remote.remove(index_name(run, name))


def _copied_part(remote: Remote, run: str, part: Part) -> Copy:
    """Bring a part into the store: its contents, then its index."""
    copy, name = _copy(run, part), index_name(run, part.name)
    if (stored := there(remote, name)) is not None:
        _check_ours(remote, copy, stored, part)
        if part.is_final or stored == copy:
            return copy
    for file in copy.files:
        remote.put(path_of(file), object_name(run, file))
        if sha256_of(path_of(file)) != file.sha256:
            remote.remove(object_name(run, file))
            raise FileNotFoundError(f"{file.path} was written meanwhile")
    content = copy.model_dump_json(indent=1).encode()
    if not part.is_final:
        remote.replace(name, content)
    elif not remote.create(name, content) and (stored := there(remote, name)) is not None:
        _check_ours(remote, copy, stored, part)
    return copy


def _check_ours(remote: Remote, copy: Copy, stored: Copy, part: Part) -> None:
    _check_id(remote, copy.run, stored)
    if part.is_final and not is_same(copy, stored):
        raise made_elsewhere(remote, copy.run, f"{part.name} of run {copy.run!r} as another machine made it")


def check_part(remote: Remote, run: str, name: str) -> None:
    """Raises AnotherRun where the store has a part, of which it is not known here that it has it, as another machine made it."""
    copied = _copied(run, remote.url)
    if name in {*copied.parts, *copied.dropped} or (stored := there(remote, index_name(run, name))) is None:
        return
    _check_id(remote, run, stored)
    ours = next((part for part in parts(run) if part.name == name), None)
    if ours is not None:
        _check_ours(remote, _copy(run, ours), stored, ours)
    elif name != BEGINNING:
        raise made_elsewhere(remote, run, f"{name} of run {run!r} as another machine made it")


def _check_id(remote: Remote, run: str, stored: Copy) -> None:
    if stored.run_id != (ours := run_id(run)):
        raise AnotherRun(
            f"{remote.url} holds another run {run!r} (id {stored.run_id}, here it is {ours}): give the run another name, "
            "or set RATCHET_STORE_URL to another place"
        )


def made_elsewhere(remote: Remote, run: str, what: str) -> AnotherRun:
    return AnotherRun(
        f"{remote.url} has {what}: stop this run, and go on where it is now, or from there with `ratchet rm {run}` and "
        f"`ratchet run --from {remote.url}/{run}`"
    )


def there(remote: Remote, name: str) -> Copy | None:
    """Read an index; None where there is none. Raises Unreadable for one that this version cannot read."""
    content = remote.read(name)
    try:
        return None if content is None else Copy.model_validate_json(content)
    except ValidationError as error:
        raise Unreadable(f"{remote.url}/{name} is no index that this version of Ratchet can read") from error


def _copy(run: str, part: Part) -> Copy:
    return Copy(run=run, run_id=run_id(run), files=tuple(map(record_of, part.files)))


def _digest(copy: Copy) -> str:
    return hashlib.sha256(copy.model_dump_json().encode()).hexdigest()


def _copied(run: str, url: str) -> Copied:
    """What is known to be in the store at this address."""
    noted = read_note(RunFolder.of(run).copied, Copied)
    return noted if noted and noted.url == url else Copied(url=url, parts={})
