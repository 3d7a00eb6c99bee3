"""The job queue between a persistent trainer and its owner: files in a folder, each written atomically. No torch here: both sides import it.

owner.json          Owner                      who submits jobs             by the owner
jobs/000001.json    QueuedJob                  in order, one at a time      by the owner
stop                                           end when idle                by the owner
turns/000001.json   QueuedJob; job null: end   the other ranks follow       by rank 0
state.json          State                                                   by rank 0
ranks/0.json        ProcessRef                                              by each rank
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.processes.children import ProcessRef
from infra.store.digests import Stamp, stamp_of
from infra.store.files import read_json, read_note, write_note


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Owner(Message):
    process: ProcessRef
    grace_s: float
    """Seconds that the program waits for another owner when this one is gone."""


class QueuedJob(Message):
    job: Path | None
    """A job.json."""


class State(Message):
    """Written when the program is ready, and after each job when the program is asleep."""

    num_done: int
    exit_code: int
    """Exit code of the last job, as the one-shot program would have returned it."""
    held_bytes: int
    """Device memory still held, over all ranks, as counted by the allocator. NVML also counts the CUDA context."""
    sleep_s: float


class Mailbox:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state_path = folder / "state.json"

    def open(self) -> None:
        for name in ("jobs", "turns", "ranks"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def put(self, kind: str, number: int, order: QueuedJob) -> None:
        write_note(self.folder / kind / f"{number:06d}.json", order.model_dump(mode="json"))

    def get(self, kind: str, number: int) -> QueuedJob | None:
        return read_note(self.folder / kind / f"{number:06d}.json", QueuedJob)

    def num_orders(self) -> int:
        return len(list((self.folder / "jobs").glob("*.json")))

    def register_owner(self, owner: Owner) -> None:
        write_note(self.folder / "owner.json", owner.model_dump(mode="json"))

    def owner(self) -> Owner:
        return Owner.model_validate(read_json(self.folder / "owner.json"))

    def publish_state(self, state: State) -> None:
        write_note(self._state_path, state.model_dump(mode="json"))

    def state(self) -> State | None:
        return read_note(self._state_path, State)

    def state_stamp(self) -> Stamp | None:
        """Stamp of the state file. It differs when another state was published; the file is not read."""
        try:
            return stamp_of(self._state_path)
        except FileNotFoundError:
            return None

    def ask_to_stop(self) -> None:
        (self.folder / "stop").touch()

    def is_asked_to_stop(self) -> bool:
        return (self.folder / "stop").exists()

    def enter(self, rank: int, process: ProcessRef) -> None:
        write_note(self.folder / "ranks" / f"{rank}.json", process.model_dump(mode="json"))

    def ranks(self) -> list[ProcessRef]:
        found = [read_note(path, ProcessRef) for path in sorted((self.folder / "ranks").glob("*.json"))]
        return [ref for ref in found if ref]
