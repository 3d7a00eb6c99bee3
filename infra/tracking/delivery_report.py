"""What MLflow has of a run, in one line: what was delivered, what is missing, and where to look."""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from infra.store.layout import EvaluationFolder, StepFolder
from infra.tracking import mlflow_address, mlflow_store, upload

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Longest time that the end of a run waits for its delivery. A store that is away is not waited for."""
POLL_S = 0.2


def log_at_end(run: str) -> None:
    """Log what MLflow has of a run, once the delivery under way has ended or PATIENCE_S are over."""
    if mlflow_address.trouble(mlflow_address.of(run)):
        mlflow_address.warn_at_end(run, mlflow_store.waiting(run))
        return
    deadline = time.monotonic() + PATIENCE_S
    while mlflow_store.waiting(run) and upload.is_running() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    log.info("%s", line(run))


def line(run: str) -> str:
    """Say in words what MLflow has of a run, and where."""
    waiting = mlflow_store.waiting(run)
    delivered = [folder for folder in mlflow_store.deliverable(run) if folder not in waiting]
    rest = ""
    if waiting and upload.is_running():
        rest = f"; {_counted(waiting)} on the way"
    elif waiting:
        rest = f"; it lacks {_counted(waiting)}, `{mlflow_address.command(run)}` brings them ({upload.log_path()} says why)"
    where = mlflow_store.page_url(run) or f"{mlflow_store.uri(run)} (`ratchet up` starts a server that shows it)"
    return f"MLflow has {_counted(delivered)} of run {run}{rest}: {where}"


def _counted(folders: Iterable[Path]) -> str:
    counts = Counter(map(_kind, folders))
    names = [f"{count} {name}{'s' * (count > 1)}" if name != "the summary" else name for name, count in counts.items()]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names) or "nothing"


def _kind(folder: Path) -> str:
    if StepFolder(folder).manifest.exists():
        return "step"
    return "evaluation" if EvaluationFolder(folder).record.exists() else "the summary"
