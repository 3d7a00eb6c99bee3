"""Upload the files of committed steps to the MLflow store, outside of any step: `ratchet upload`.

step --hand_over--> python -m infra.tracking.upload --tracking.deliver--> MLflow

An unavailable, slow or hung store delays this process, but never a step. If this process gives up, the rest waits on disk for the process of
the next step, or for that command by hand. In a workspace one process uploads at a time, in the order of the steps.
"""

import argparse
import fcntl
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from infra.processes import children
from infra.processes.children import ProcessRef
from infra.settings import CHECKOUT, Settings, main_python, settings
from infra.store.files import read_note, usable_workspace, write_json
from infra.store.layout import Workspace, runs_folder
from infra.tracking import mlflow_address, mlflow_store

log = logging.getLogger(__name__)

LIFETIME_S = 300
"""Seconds after which an upload gives up, plus the time that its data takes over a slow connection. A store cannot make it run longer."""
SLOW_BYTES_PER_S = 1_000_000
ATTEMPT_EVERY_S = 10.0
FIRST_WAIT_S = 15.0
"""Seconds that a run's first step waits for its MLflow run, for a link on its page. Later steps do not wait."""


def waiting_runs() -> list[str]:
    """Return the runs with data that the store does not have yet."""
    return [run for run in _runs() if mlflow_store.waiting(run)]


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
    ref = children.start([str(main_python()), "-m", "infra.tracking.upload", "--if-idle"], log_path(), cwd=CHECKOUT)
    write_json(_notes() / f"{ref.program}.json", ref.model_dump(mode="json"))
    for path in _notes().glob("*.json"):
        if (other := _ref_in(path)) is None or not children.find(other):
            path.unlink(missing_ok=True)
    return ref


def stop() -> bool:
    """End the uploads started by steps of this workspace. Returns whether one was running. Pending data waits on disk."""
    refs = [_ref_in(path) for path in _notes().glob("*.json")]
    alive = [ref for ref in refs if ref and children.find(ref)]
    for ref in alive:
        children.stop(ref)
    for path in _notes().glob("*.json"):
        path.unlink(missing_ok=True)
    return bool(alive)


def is_running() -> bool:
    """Whether an upload that was started in this workspace is at work."""
    return any((ref := _ref_in(path)) and children.find(ref) for path in _notes().glob("*.json"))


def _notes() -> Path:
    """A file for each delivery that was started and may still live."""
    return Workspace.here().deliveries


def _ref_in(path: Path) -> ProcessRef | None:
    return read_note(path, ProcessRef)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tracking.upload", description="Bring what waits on disk into the MLflow store."
    )
    parser.add_argument("--if-idle", action="store_true", help="exit at once if another upload is already waiting")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        usable_workspace()
        upload(if_idle=options.if_idle)
    except ValueError as error:
        sys.exit(f"error: {error}")


def upload(run: str | None = None, to: str | None = None, *, if_idle: bool = False) -> None:
    """Deliver what waits, of all runs or of one; with `to` have that run deliver there from now on, and all of it now.

    if_idle: Exit at once if another upload is already waiting.

    Raises:
        ValueError: for a run that does not exist, or an address that cannot be used.
    """
    if run and to:
        move(run, to)
    signal.signal(signal.SIGALRM, _give_up)
    with _turn(if_idle) as is_mine:
        if is_mine:
            signal.alarm(lifetime_s())  # its own: others have left because it waited, however long the one before it took
            if run and mlflow_store.deliver(run) is None:
                sys.exit(f"error: run {run} was not delivered to {mlflow_store.uri(run)}; the reason stands above")
            if not run or to:
                deliver_all()
            signal.alarm(0)


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
    return LIFETIME_S + sum(map(mlflow_store.num_bytes_waiting, _runs())) // SLOW_BYTES_PER_S


def deliver_all() -> None:
    """Until nothing waits: steps that were committed meanwhile are delivered too. Ends the process with an error where a run cannot be read."""
    unreadable = set[str]()
    while runs := [run for run in waiting_runs() if run not in unreadable]:
        did_all = True
        for run in runs:
            try:
                did_all = mlflow_store.deliver(run) is not None and did_all
            except Exception:  # one run that cannot be read keeps no other from the store
                log.exception("run %s cannot be delivered, the others are", run)
                unreadable.add(run)
        if not did_all:
            time.sleep(ATTEMPT_EVERY_S)
    if unreadable:
        sys.exit(f"error: not delivered, because they cannot be read: {', '.join(sorted(unreadable))}; the reasons stand above")


def _give_up(*_: object) -> None:
    sys.exit(f"gave up, the store was too slow; not delivered yet: {', '.join(waiting_runs()) or 'nothing'}")


@contextmanager
def _turn(if_idle: bool) -> Iterator[bool]:
    """One delivers and one more may wait for it: a third can leave, the waiting one looks at the disk after it."""
    folder = Workspace.here().locks
    folder.mkdir(parents=True, exist_ok=True)
    # The kernel frees both, however this process ends.
    with (folder / "delivery-next").open("w") as next_in_line, (folder / "delivery").open("w") as delivering:
        try:
            fcntl.flock(next_in_line, fcntl.LOCK_EX | (fcntl.LOCK_NB if if_idle else 0))
        except BlockingIOError:
            yield False
            return
        fcntl.flock(delivering, fcntl.LOCK_EX)
        fcntl.flock(next_in_line, fcntl.LOCK_UN)
        yield True


if __name__ == "__main__":
    main()
