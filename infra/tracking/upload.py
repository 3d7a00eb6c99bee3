"""Upload the files of committed steps to the MLflow store, and copy them to RATCHET_STORE_URL, outside of any step: `ratchet upload`.

step --start_upload--> python -m infra.tracking.upload --mlflow_store.deliver--> MLflow
                                                       --copying.copy_run-----> the store

An unavailable, slow or hung store delays this process, but never a step. If this process gives up, the rest waits on disk for the process of
the next step, or for that command by hand. In a workspace one process uploads at a time, in the order of the steps.

The process of a step stays for the next steps of its owner, the process that started it: MLflow's libraries are loaded once. It ends after
the last request of an owner that has ended, or IDLE_S after the last one of any.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from infra.failures import StoreRefused
from infra.mirror import copying, under_way
from infra.mirror.remote import SLOW_BYTES_PER_S, AddressRefused
from infra.processes import children
from infra.processes.children import ProcessRef
from infra.runs import lineage, run_state
from infra.settings import CHECKOUT, Settings, main_python, settings
from infra.store.files import read_note, usable_workspace, write_json, write_note
from infra.store.layout import RunFolder, Workspace, runs_folder
from infra.tracking import mlflow_address, mlflow_store

log = logging.getLogger(__name__)

LIFETIME_S = 300
"""Seconds after which an upload gives up, plus the time that its data takes over a slow connection. A store cannot make it run longer."""
ATTEMPT_EVERY_S = 10.0
FIRST_WAIT_S = 15.0
"""Seconds that a run's first step waits for its MLflow run, for a link on its page. Later steps do not wait."""
IDLE_S = 60.0
"""Seconds without a request after which a step's process ends though its owner lives on."""
POLL_S = 0.2
"""Seconds between two looks for a request: one small file is read."""


class Destination(NamedTuple):
    name: str
    waiting: Callable[[str], Sequence[object]]
    """What it does not have of a run."""
    send: Callable[[str], bool]
    """Bring it there; says whether it has all of it now."""


DESTINATIONS = (
    Destination("the store", lambda run: copying.waiting(run), lambda run: under_way.copy_run(run)),
    Destination("MLflow", lambda run: mlflow_store.waiting(run), lambda run: mlflow_store.deliver(run) is not None),
)


def waiting_runs() -> list[str]:
    """Return the runs with data that MLflow or the store does not have yet."""
    return [run for run in _runs() if any(to.waiting(run) for to in DESTINATIONS)]


def _runs() -> list[str]:
    return sorted(folder.name for folder in runs_folder().glob("*"))


def start_upload(run: str) -> str | None:
    """Start a process that uploads all pending data. Returns the id of the MLflow run if it is known already."""
    ref = start()
    deadline = time.monotonic() + FIRST_WAIT_S
    while (run_id := mlflow_store.known_run(run)) is None and time.monotonic() < deadline and children.find(ref):
        time.sleep(0.2)
    return run_id or mlflow_store.known_run(run)


def log_path() -> Path:
    return Workspace.here().logs / "delivery.log"


def start() -> ProcessRef:
    """Have all that waits uploaded: by the process that stays from an earlier request, else by a new one."""
    # Perf: an upload takes 0.15 CPU s in a process that stays, 4.2 in a new one (2 CPU cores, docs/history/decisions.md).
    write_note(Workspace.here().upload_request, uuid.uuid4().hex)
    with _locked(_serving(), wait=False) as is_free:
        pass
    alive = [ref for path in _notes().glob("*.json") if (ref := _alive_in(path))]
    return _start_process() if is_free or not alive else alive[0]


def _start_process() -> ProcessRef:
    owner = children.ref_of(os.getpid()).model_dump_json()
    argv = [str(main_python()), "-m", "infra.tracking.upload", "--owner", owner]
    ref = children.start(argv, log_path(), cwd=CHECKOUT)
    write_json(_notes() / f"{ref.program}.json", ref.model_dump(mode="json"))
    return ref


def stop() -> bool:
    """End the uploads started by steps of this workspace. Returns whether one was running. Pending data waits on disk."""
    alive = [ref for path in _notes().glob("*.json") if (ref := _alive_in(path))]
    for ref in alive:
        children.stop(ref)
    for path in _notes().glob("*.json"):
        path.unlink(missing_ok=True)
    return bool(alive)


def is_running() -> bool:
    """Whether a process that uploads for this workspace is alive."""
    return any(_alive_in(path) for path in list(_notes().glob("*.json")))


def _notes() -> Path:
    """A file for each delivery that was started and may still live."""
    return Workspace.here().deliveries


def _alive_in(path: Path) -> ProcessRef | None:
    """The process of a note; a note of one that has ended is removed."""
    ref = read_note(path, ProcessRef)
    if ref is None or not children.find(ref):
        path.unlink(missing_ok=True)
        return None
    return ref


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tracking.upload", description="Bring what waits on disk into the MLflow store."
    )
    parser.add_argument("--owner", type=ProcessRef.model_validate_json, help="stay for further requests of this process, as JSON")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        usable_workspace()
        if options.owner:
            serve(options.owner)
        else:
            upload()
    except ValueError as error:
        sys.exit(f"error: {error}")


def serve(owner: ProcessRef) -> None:
    """Upload at each request, until the owner has ended and nothing was requested since. Others with the same store leave."""
    done = ""
    # A request that came just before the lock was freed found a living process: it is looked for once more afterwards.
    while _request(done) != done:
        with _locked(_serving(), wait=False) as is_mine:
            if not is_mine:
                return
            while (request := _next_request(done, owner)) != done:
                with _turn():
                    deliver_all()
                done = request


def _serving() -> str:
    """The lock of the process that stays. Each address of a store has its own: a process keeps the address that it was started with."""
    return f"upload-process-{hashlib.sha256((settings().store_url or '').encode()).hexdigest()[:12]}"


def _next_request(done: str, owner: ProcessRef) -> str:
    """Wait for another request than the one that is done; gives that one where no other comes."""
    deadline = time.monotonic() + IDLE_S
    while (request := _request(done)) == done and children.find(owner) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return request


def _request(default: str) -> str:
    """The latest request; the default where there is none, or where the workspace was removed."""
    return read_note(Workspace.here().upload_request, str) or default


def upload(run: str | None = None, to: str | None = None) -> None:
    """Deliver what waits, of all runs or of one; with `to` have that run deliver there from now on, and all of it now.

    Raises:
        ValueError: for a run that does not exist, or an address that cannot be used.
    """
    if run and to:
        move(run, to)
    with _turn():
        if run and not copying.copy_run(run):
            sys.exit(f"error: run {run} was not copied to {settings().store_url}; the reason stands above")
        if run and mlflow_store.deliver(run) is None:
            sys.exit(f"error: run {run} was not delivered to {mlflow_store.uri(run)}; the reason stands above")
        if (not run or to) and (unreadable := deliver_all()):
            sys.exit(f"error: not delivered: {', '.join(unreadable)}; the reasons stand above")


def drop(run: str, step: int) -> list[Path]:
    """Remove the steps of a run from `step` on, as lineage.drop does, and what the store has of them; one that does not answer gives them up at the
    next upload. Returns the removed paths.

    Raises:
        ValueError: if the run has no such step, or cannot continue from there; nothing was removed then. AnotherRun where another machine has
            continued the run: removed are the steps that are here.
    """
    lineage.droppable(run, step)
    with _turn():  # an upload under way would mark as delivered what is made in the place of a dropped step
        copying.note_dropped(run, step)
        removed = lineage.drop(run, step)
        if RunFolder.of(run).copied.exists():
            under_way.copy_run(run)
    return removed


def remove(run: str) -> None:
    """Remove a run's folder, as run_state.remove does, when no upload is under way: it would mark in the folder of the next run of this name what
    it has brought of this one."""
    with _turn():
        run_state.remove(run)


def move(run: str, uri: str) -> None:
    """Have a run deliver to another address from now on.

    Raises:
        ValueError: for a run that does not exist, or an address that holds a password or does not answer.
    """
    if not (runs_folder() / run / "config.json").exists():
        raise ValueError(f"workspace {settings().workspace} has no run {run!r}")
    try:
        Settings(mlflow_uri=uri)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    if found := mlflow_address.trouble(uri):
        raise ValueError(found)
    mlflow_address.write(run, uri)


def lifetime_s() -> int:
    """Seconds that a delivery which begins now may take."""
    return (
        LIFETIME_S
        + sum(mlflow_store.num_bytes_waiting(run) + copying.num_bytes_waiting(run) for run in _runs()) // SLOW_BYTES_PER_S
    )


def deliver_all() -> list[str]:
    """Until nothing waits: steps that were committed meanwhile are delivered too. Returns the runs that cannot be delivered."""
    failed = set[tuple[str, str]]()
    while pending := [(run, to) for to in DESTINATIONS for run in _runs() if (run, to.name) not in failed and to.waiting(run)]:
        did_all = True
        for run, to in pending:
            try:
                did_all = to.send(run) and did_all
            except (StoreRefused, AddressRefused) as error:
                log.error("%s", error)
                failed.add((run, to.name))
            except Exception:  # one run that cannot be read keeps no other from its destinations
                log.exception("run %s cannot be delivered to %s, the others are", run, to.name)
                failed.add((run, to.name))
        if not did_all:
            time.sleep(ATTEMPT_EVERY_S)
    return sorted({run for run, _ in failed})


def _give_up(*_: object) -> None:
    sys.exit(f"gave up, the store was too slow; not delivered yet: {', '.join(waiting_runs()) or 'nothing'}")


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other process uploads, then have `lifetime_s()` for what waits."""
    with _locked("delivery", wait=True):
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(lifetime_s())
        try:
            yield
        finally:
            signal.alarm(0)


@contextmanager
def _locked(name: str, *, wait: bool) -> Iterator[bool]:
    """Hold a lock of the workspace, which the kernel frees however this process ends. Gives whether it was free, where it is not waited for."""
    folder = Workspace.here().locks
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            log.info("waiting for the upload that is under way")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


if __name__ == "__main__":
    main()
