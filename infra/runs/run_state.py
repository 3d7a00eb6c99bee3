"""How far a run is and whether a process works on it, read from its files; and the request that it stops.

runs/<run>/stop    an active run ends after its current step; removed when the run starts or resumes
"""

import shutil
import uuid
from pathlib import Path
from typing import NamedTuple

from infra.config import RunConfig
from infra.config.tools.names import RUN_NAME
from infra.config.tools.overrides import nearest
from infra.processes import children, gpu_lock
from infra.processes.gpu_lock import Holder
from infra.runs import evaluations, history, lineage
from infra.runs.manifest import read_manifest
from infra.settings import settings
from infra.store.files import read_json, read_record, write_note
from infra.store.layout import RunFolder, run_folder, runs_folder, step_folder_of

STOP = "stop"
REMOVED_RUNS = "removed-runs"
"""Folder of the workspace; holds something only while a run is being removed."""


class RunState(NamedTuple):
    name: str
    num_committed: int
    """Committed steps on the disk."""
    num_steps: int
    """Steps that the configuration asks for."""
    last_reward: float | None
    """Mean reward of the latest committed step; None before the first."""
    best_score: float | None
    """Highest score of the run's own evaluations; None where there is none."""
    best_version: int | None
    """Adapter version with that score."""
    state: str
    """at work, stopping, finished, all steps made (but not the report), no progress, stopped, not finished, or no step yet."""


def known_runs() -> list[str]:
    """Return the names of the runs of this workspace, in alphabetical order."""
    return sorted(path.name for path in runs_folder().glob("[!.]*") if RunFolder(path).config.exists())


def check_exists(run: str) -> None:
    """Raises ValueError for a run that does not exist in this workspace; names the most similar run."""
    if not RUN_NAME.fullmatch(run) or not run_folder(run).is_dir():
        known = known_runs()
        listed = f"; it has {', '.join(known[:10])}{', ...' if len(known) > 10 else ''}" if known else "; it has none"
        raise ValueError(f"workspace {settings().workspace} has no run {run!r}{nearest(run, known) or listed}")


def config_of(run: str) -> RunConfig:
    """Return the configuration with which a run resumes: that of its latest committed step, else its initial one.

    Raises:
        ValueError: for a run that does not exist, or a file that cannot be read.
    """
    check_exists(run)
    if steps := lineage.committed_steps(run):
        return read_manifest(step_folder_of(run, steps[-1])).config
    path = RunFolder.of(run).config
    if not path.exists():
        raise ValueError(f"{path} does not exist: the run has not begun, or its file was removed")
    return read_record(path, RunConfig, cure="remove it: the run has committed nothing and begins again")


def state_of(run: str) -> RunState:
    """Read the state of a run.

    Raises:
        ValueError: as `config_of` does.
    """
    config, steps = config_of(run), lineage.committed_steps(run)
    figures = history.figures_at(run, steps[-1]) if steps else None
    found = evaluations.of_run(run, config.eval_config)
    best = evaluations.best_of(config.evaluation, found)
    score = best.metrics.get(evaluations.best_metric(config.evaluation, found)) if best else None
    return RunState(
        name=run,
        num_committed=len(steps),
        num_steps=config.num_steps,
        last_reward=(figures or {}).get("reward/mean"),
        best_score=score,
        best_version=best.step if best else None,
        state=_state(run, config, len(steps)),
    )


def _state(run: str, config: RunConfig, num_committed: int) -> str:
    if owner_at_work(run):
        return "stopping" if is_asked_to_stop(run) else "at work"
    report = RunFolder.of(run).report
    made = read_json(report) if report.exists() else {}
    if made.get("num_steps") == num_committed and made.get("stopped") in ("no progress", "asked to stop"):
        return "no progress" if made["stopped"] == "no progress" else "stopped"
    if num_committed >= config.num_steps:  # without a report: by `ratchet step`, or its end was interrupted
        return "finished" if made else "all steps made"
    return "not finished" if num_committed else "no step yet"


def owner_at_work(run: str) -> Holder | None:
    """Return the process that works on a run: on its steps or an evaluation, alone or in a sweep. None if there is none."""
    owner = gpu_lock.holder()
    if owner is None or owner.workspace != settings().workspace or children.find(owner.process) is None:
        return None
    kind, _, name = owner.who.rpartition(" ")
    if kind == "sweep":
        path = RunFolder.of(run).config
        return owner if path.exists() and read_json(path)["tracking"]["sweep"] == name else None
    return owner if name == run and kind in ("run", "evaluation of", "chat with run") else None


def remove(run: str) -> None:
    """Remove a run's folder, and leftovers of an earlier interrupted removal. Its data in MLflow is retained.

    The folder is renamed first, so that leftovers of an interrupted removal are not a run.
    """
    graves = settings().workspace / REMOVED_RUNS
    with gpu_lock.gpu_lock(f"removal of run {run}"):
        graves.mkdir(exist_ok=True)
        run_folder(run).rename(graves / uuid.uuid4().hex)
        shutil.rmtree(graves)


def ask_to_stop(run: str) -> Path:
    """Request that the process that works on a run ends it after its current step."""
    return write_note(run_folder(run) / STOP, "after this step")


def is_asked_to_stop(run: str) -> bool:
    return (run_folder(run) / STOP).exists()


def forget_stop(run: str) -> None:
    """Remove the stop request: it does not apply to a run that starts or resumes later."""
    (run_folder(run) / STOP).unlink(missing_ok=True)
