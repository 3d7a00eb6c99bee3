"""Go on with a run from its copy in a store: `ratchet run --from s3://bucket/runs/mine`, on a machine that has never seen it."""

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from infra.config.tools.names import RUN_NAME
from infra.mirror.copies import BEGINNING, INDEX, Copy, adapter_part, index_name, is_of, manifest_of, object_name, step_part
from infra.mirror.copying import write_copied
from infra.mirror.paid import take_over
from infra.mirror.remote import Remote, RemoteError
from infra.mirror.under_way import FOLDER, fetch_under_way
from infra.records import File
from infra.runs import lineage
from infra.settings import settings
from infra.store.digests import sha256_of
from infra.store.files import fresh_folder, only_maker, open_workspace, publish_folder, run_id
from infra.store.layout import REPORT, RunFolder, StepFolder, Workspace, run_folder, step_folder_of

log = logging.getLogger(__name__)


class StoredRun(NamedTuple):
    """A run as a store has it."""

    name: str
    num_steps: int
    """Committed steps."""
    last_reward: float | None
    url: str
    """For `ratchet run --from`."""
    trouble: str = ""
    """Why it cannot be continued: a file that is damaged."""


def stored_runs(url: str) -> list[StoredRun]:
    """The runs of a store, in alphabetical order.

    Raises:
        ValueError: for an address that cannot be used, or a folder that does not exist; RemoteError for one that does not answer.
    """
    remote = _existing(url)
    return [
        _stored(remote, name) for name in remote.names("") if remote.names(f"{name}/{INDEX}") or remote.names(f"{name}/{FOLDER}")
    ]


def _existing(url: str) -> Remote:
    remote = Remote(url)
    if remote.is_missing():
        raise ValueError(f"store {url} does not exist: give a folder that is there, or s3://BUCKET/FOLDER, gs:// or az://")
    return remote


def _stored(remote: Remote, run: str) -> StoredRun:
    url, steps = f"{remote.url}/{run}", list[str]()
    try:
        names = _part_names(remote, run)
        steps = [part for part in names if part.startswith(_STEP)]
        _check_no_gap(url, names)
        return StoredRun(run, len(steps), _last_reward(remote, run, steps), url)
    except ValueError as error:
        return StoredRun(run, len(steps), None, url, str(error))


def _last_reward(remote: Remote, run: str, steps: list[str]) -> float | None:
    """steps: Names of their parts. Raises ValueError where the last one's index or report is damaged."""
    if not steps:
        return None
    step = steps[-1].removeprefix(_STEP)
    report = next((file for file in _copy_of(remote, run, steps[-1]).files if file.path.endswith(f"/{step}/{REPORT}")), None)
    if report is None:
        return None
    content = remote.read(object_name(run, report), report.num_bytes)
    if content is None or hashlib.sha256(content).hexdigest() != report.sha256:
        raise ValueError(f"{remote.url}/{object_name(run, report)} is not what was copied there ({report.path})")
    value = json.loads(content).get("metrics", {}).get("reward/mean")
    return None if value is None else float(value)


def fetch(url: str) -> str:
    """Bring a run from a store into this workspace, whole or not at all; each file is checked by its digest. Returns the run's name.

    A run that is here already, with as many steps or more, is left as it is.

    Raises:
        ValueError: for an address without a run, a run that is here with fewer steps or is another one, or a copy with gaps.
        RemoteError: where the store does not answer.
    """
    open_workspace()
    address, slash, run = url.rstrip("/").rpartition("/")
    if "://" in url and "://" not in address:
        raise ValueError(
            f"{url} names no run: give s3://BUCKET/FOLDER/RUN, as `ratchet runs --store s3://BUCKET/FOLDER` lists it"
        )
    address = address or slash or "."
    remote = _existing(address)
    names = _part_names(remote, run) if RUN_NAME.fullmatch(run) else []
    if BEGINNING not in names and not (RUN_NAME.fullmatch(run) and remote.names(f"{run}/{FOLDER}")):
        if found := Remote(url).names("") and stored_runs(url):
            raise ValueError(f"{url} is a store, not a run: give one of its runs, such as {found[0].url}")
        raise ValueError(f"{url} holds no run: `ratchet runs --store {address}` lists those that are there")
    _check_no_gap(url, names)
    with only_maker(Workspace.here().fetched / run):
        if not _is_here(remote, run, names):
            _bring(remote, run, names)
    if settings().store_url is None:
        log.warning("RATCHET_STORE_URL is not set: what run %s makes from here on is copied nowhere", run)
    return run


def _is_here(remote: Remote, run: str, names: list[str]) -> bool:
    if not run_folder(run).exists():
        return False
    there = _copy_of(remote, run, BEGINNING).run_id if names else ""
    num_here, num_there = len(lineage.committed_steps(run)), sum(name.startswith(_STEP) for name in names)
    if names and run_id(run) != there:
        raise ValueError(
            f"this workspace has another run {run!r} (id {run_id(run)}, in the store it is {there}): `ratchet rm {run}` removes it"
        )
    if num_here < num_there:
        raise ValueError(
            f"run {run} is here with {num_here} steps, the store has {num_there}: `ratchet rm {run}` removes it, then give --from again"
        )
    last = max((name for name in names if name.startswith(_STEP)), default=None)
    if last and sha256_of(_manifest_here(run, last)) != manifest_of(_copy_of(remote, run, last)):
        raise ValueError(
            f"run {run} is here with another {last} than the store's: leave --from out to go on with the one that is here, or `ratchet rm {run}` "
            "and give --from again"
        )
    return True


def _manifest_here(run: str, part: str) -> Path:
    """part: A step's."""
    return StepFolder(step_folder_of(run, int(part.removeprefix(_STEP)))).manifest


def _bring(remote: Remote, run: str, names: list[str]) -> None:
    staging = fresh_folder(Workspace.here().fetched / run)
    copies = [_copy_of(remote, run, name) for name in names]
    files = {file.path: file for copy in copies for file in copy.files}
    if strange := [path for path in files if not is_of(run, path)]:
        raise ValueError(f"{remote.url}/{run}/{INDEX} names {strange[0]!r}, no file of run {run!r}: give it its own name again")
    for file in files.values():
        _bring_file(remote, run, file, staging / file.path)
    log.info("%d files of run %s fetched from %s", len(files), run, remote.url)
    write_copied(
        staging / RunFolder.of(run).copied.relative_to(Workspace.here().path), remote.url, dict(zip(names, copies, strict=True))
    )
    fetch_under_way(remote, run, names, staging)
    if not (staging / RunFolder.of(run).config.relative_to(Workspace.here().path)).exists():
        raise ValueError(
            f"{remote.url}/{run} has no committed step, and its copy of the first one is not whole: begin the run again"
        )
    folder = staging / run_folder(run).relative_to(Workspace.here().path)
    take_over(run, folder)
    publish_folder(folder, run_folder(run))


def _bring_file(remote: Remote, run: str, file: File, target: Path) -> None:
    remote.get(object_name(run, file), target, file.num_bytes)
    if (found := sha256_of(target)) != file.sha256:
        raise ValueError(
            f"{remote.url}/{object_name(run, file)} is not what was copied there ({file.path}): its SHA-256 is {found}; "
            "nothing was fetched"
        )


def _check_no_gap(url: str, names: list[str]) -> None:
    """Copies are made in order, so that a gap means that someone removed something."""
    numbers = [int(name.removeprefix(_STEP)) for name in names if name.startswith(_STEP)]
    expected = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    needed = {name for number in expected for name in (step_part(number), adapter_part(number + 1))}
    if missing := sorted(needed - set(names)):
        raise ValueError(f"{url} lacks {missing[0]}: what comes after it cannot be continued")


def _part_names(remote: Remote, run: str) -> list[str]:
    """Names of a run's parts, in alphabetical order. A listing may lag behind what was written: steps are asked for by their names too."""
    names = {name.removesuffix(".json") for name in remote.names(f"{run}/{INDEX}")}

    def is_there(part: str) -> bool:
        return part in names or remote.num_bytes(index_name(run, part)) is not None

    number = min((int(name.removeprefix(_STEP)) for name in names if name.startswith(_STEP)), default=0)
    while names and is_there(step_part(number)):
        names |= {step_part(number), *(part for part in (BEGINNING, adapter_part(number + 1)) if is_there(part))}
        number += 1
    return sorted(names)


def _copy_of(remote: Remote, run: str, part: str) -> Copy:
    name = index_name(run, part)
    if (content := remote.read(name)) is None:
        raise RemoteError(f"{remote.url} listed {name} and does not give it")
    try:
        return Copy.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{remote.url}/{name} is no index that this version of Ratchet can read") from error


_STEP = step_part(0).removesuffix("000000")
