"""The persistent trainer: a torchrun that keeps running between steps, asleep and off the GPU.

train task --jobs/000007.json--> torchrun --resident --result.json, state.json--> train task

`trainer.json` in the workspace records which process it is. A later process adopts it if it is alive, idle and was started for the same
base model, layout, code and versions. Otherwise it is ended and another one is started. If it fails in any way, a fresh torchrun runs
the job.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.machine import devices
from infra.megatron.protocol import shared_experts
from infra.megatron.protocol.job import TrainJob, TrainResult, stage_of
from infra.megatron.protocol.mailbox import Mailbox, Owner, QueuedJob, State
from infra.processes import children, gpu_programs
from infra.processes import logs as program_logs
from infra.processes.children import ProcessRef
from infra.settings import CHECKOUT, settings
from infra.store import code_digest
from infra.store.files import PRIVATE, fresh_folder, read_json, read_note, write_json, write_note
from infra.store.layout import TrainFolder, Workspace
from infra.telemetry import program_versions
from infra.trainers import log_parser, torchrun
from infra.trainers.interface import TrainerLost, TrainingFailed
from infra.trainers.torchrun import TorchrunTrainer

log = logging.getLogger(__name__)

PROGRAM = "infra.megatron"
POLL_S = 0.005
"""Seconds between two polls for the end of a job. Each poll is one system call."""
WATCH_S = 0.1
"""Seconds between two checks of whether the program is alive."""
ORPHAN_GRACE_S = 900.0
"""Seconds that a program without an owner waits for the next step's process."""


class TrainerState(BaseModel):
    """The content of trainer.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    process: ProcessRef
    identity: str
    """Digest of everything it was started for. Another identity needs another program."""
    folder: Path
    """Folder of its job queue."""
    log_path: Path


# Perf: a later job takes 5.5 s, a fresh torchrun 20.1 s (7B, H200, docs/results/h200-trainer.md).
class PersistentTrainer:
    def __init__(self, orphan_grace_s: float = ORPHAN_GRACE_S) -> None:
        self.orphan_grace_s = orphan_grace_s

    def train(self, job: TrainJob, folder: Path) -> TrainResult:
        job_path = TrainFolder(folder).job
        write_json(job_path, job.model_dump(mode="json"))
        state = _adopt(job) or _launch(job, self.orphan_grace_s)
        try:
            done = self._do(state, job_path, TrainFolder(folder).log, job.trainer.timeout_s)
        except TrainerLost as error:
            log.warning("the persistent trainer failed, a fresh one does the job: %s", error)
            stop_recorded()
            _clean(job)
            lent = job.shared_experts  # perhaps that engine ended; one that lives leaves no room for a second copy
            lent = lent if lent and shared_experts.of_living_engine(lent) else None
            return TorchrunTrainer().train(job.model_copy(update={"shared_experts": lent}), folder)
        except BaseException:
            stop_recorded()
            raise
        if done.exit_code:
            raise TrainingFailed(
                f"the trainer gave {done.exit_code}; the end of its log:\n{program_logs.last_lines(TrainFolder(folder).log)}"
            )
        log.info("trainer asleep after %.2f s, it holds %.1f GiB", done.sleep_s, done.held_bytes / 2**30)
        return TrainResult.model_validate(read_json(job.result_path))

    def _do(self, state: TrainerState, job_path: Path, log_path: Path, timeout_s: float) -> State:
        """Run one job, and wait until the program is asleep again."""
        box = Mailbox(state.folder)
        box.register_owner(_owner(self.orphan_grace_s))
        number = box.num_orders() + 1
        with _copied(state.log_path, log_path):
            box.put("jobs", number, QueuedJob(job=job_path))
            said = _wait(box, number, state.process, timeout_s)
        if said is None:
            output = log_path.read_text(errors="replace")
            message = f"it ended in the middle of a job; the end of {log_path}:\n{program_logs.last_lines(log_path)}"
            raise torchrun.known_cause(message, output, log_path) or TrainerLost(message)
        return said


def start_early(job: TrainJob) -> None:
    """Start the program that a job will need, unless one is alive, so that it imports its libraries before the job is there. It takes nothing
    of a GPU before its first job. What goes wrong is only logged: the job meets it again.

    job: Only what decides the program counts.
    """
    state = recorded()
    if state is not None and children.find(state.process) is not None:
        return
    try:
        _launch(job, ORPHAN_GRACE_S)
    except (OSError, ValueError, RuntimeError) as error:
        log.warning("the persistent trainer does not start before its first job: %s", error)


def _wait(box: Mailbox, number: int, process: ProcessRef, timeout_s: float) -> State | None:
    """Wait until `number` jobs are done; None if the program ended first. Raises TrainerLost after timeout_s."""
    began, seen, next_watch = time.monotonic(), None, 0.0
    while True:
        is_alive = True
        if (now := time.monotonic()) >= next_watch:
            next_watch, is_alive = now + WATCH_S, children.find(process) is not None
        # The stamp is taken before the state is read: a change in between shows at the next poll.
        if (stamp := box.state_stamp()) != seen:
            seen, said = stamp, box.state()
            if said and said.num_done >= number:
                return said
        if not is_alive:
            return None
        if now - began > timeout_s:
            raise TrainerLost(f"the job took longer than {timeout_s:g} s")
        time.sleep(POLL_S)


def state_path() -> Path:
    return Workspace.here().trainer_state


def recorded() -> TrainerState | None:
    """Return the content of trainer.json, whether or not that program is still alive."""
    return read_note(state_path(), TrainerState)


def stop_recorded() -> bool:
    """End the persistent trainer of this workspace, if one is alive. Returns whether one was."""
    state = recorded()
    if state is None:
        return False
    box = Mailbox(state.folder)
    box.ask_to_stop()
    alive = children.find(state.process) is not None
    gpu_programs.stop(state.process)
    state_path().unlink(missing_ok=True)
    return alive


def _adopt(job: TrainJob) -> TrainerState | None:
    """Return the running program if it can take this job. Any other program is ended."""
    state = recorded()
    if state is None:
        return None
    box = Mailbox(state.folder)
    said = box.state()
    if children.find(state.process) is None:
        log.warning("the persistent trainer with pid %d is gone; its log is %s", state.process.pid, state.log_path)
    elif state.identity != _identity(job):
        log.info(
            "the persistent trainer with pid %d was started for another model, layout, code or versions: ending it",
            state.process.pid,
        )
    elif (said.num_done if said else 0) < box.num_orders():
        log.warning("the persistent trainer with pid %d works on a job that is not waited for: ending it", state.process.pid)
    else:
        return state
    stop_recorded()
    _clean(job)  # it may have run an earlier attempt at this very job
    return None


def _launch(job: TrainJob, orphan_grace_s: float) -> TrainerState:
    """Start a program. Jobs can be queued at once; it runs them when it is up."""
    program_versions.warn_of_trainer()
    logs = Workspace.here().logs
    logs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="trainer-", dir=logs))
    box, log_path = Mailbox(folder), TrainFolder(folder).log
    box.open()
    box.register_owner(_owner(orphan_grace_s))
    meeting = fresh_folder(folder / torchrun.MEETING, PRIVATE)
    command = torchrun.command(job, "--resident", str(folder), meeting=meeting)
    environment = torchrun.environment(job, meeting)
    process = gpu_programs.start("trainer", command, log_path, environment, state_file=state_path(), cwd=CHECKOUT)
    state = TrainerState(process=process, identity=_identity(job), folder=folder, log_path=log_path)
    write_note(state_path(), state.model_dump(mode="json"))
    log.info("started a persistent trainer with pid %d; its log is %s", process.pid, log_path)
    return state


def _owner(grace_s: float) -> Owner:
    return Owner(process=children.ref_of(os.getpid()), grace_s=grace_s)


def _identity(job: TrainJob) -> str:
    about = {
        "stage": stage_of(job),
        "program": code_digest.digest(PROGRAM),
        "versions": program_versions.of_trainer(),
        "workspace": str(settings().workspace),
        "gpus": devices.trainer_gpus(job.trainer),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _clean(job: TrainJob) -> None:
    fresh_folder(job.output_dir)
    job.result_path.unlink(missing_ok=True)


@contextmanager
def _copied(source: Path, target: Path) -> Iterator[None]:
    """Copy the program's output in the meantime to the step's own log and to ours."""
    with program_logs.fresh_log(target).open("w") as output, log_parser.progress_of_log() as on_log_line:

        def copy(line: str) -> None:
            output.write(line + "\n")
            output.flush()
            on_log_line(line)

        with program_logs.followed(source, copy, poll_s=0.1):
            yield
