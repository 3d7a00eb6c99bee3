"""The MLflow address of a run: RATCHET_MLFLOW_URI as it was when the run began, kept in the run's folder; part of no configuration.

`ratchet upload NAME --to ADDRESS` changes it and uploads the run there.
"""

import logging
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from infra.settings import settings
from infra.store.files import read_json, write_json
from infra.store.layout import RunFolder, run_folder

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "uc")
OWN = "the workspace's own MLflow"


def note(run: str) -> None:
    """Write the address of this process's environment into the folder of a run that has none yet."""
    if not _file(run).exists():
        write(run, settings().mlflow_uri)


def write(run: str, uri: str | None) -> None:
    """uri: None is the workspace's own MLflow."""
    write_json(_file(run), {"uri": uri})


def of(run: str) -> str | None:
    """Return the address that a run delivers to; None is the workspace's own MLflow.

    Raises:
        ValueError: for a file that cannot be read.
    """
    if not _file(run).exists():
        return settings().mlflow_uri
    try:
        uri = read_json(_file(run))["uri"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{_file(run)} cannot be read: remove it, and the run takes RATCHET_MLFLOW_URI again") from error
    return None if uri is None else str(uri)


def check(run: str) -> None:
    """Raises ValueError where RATCHET_MLFLOW_URI is not the address that the run began with. A worker has the variables of its start."""
    noted, given = of(run), settings().mlflow_uri
    if noted != given:
        back = f"set it to {noted}" if noted else "unset it"
        if given is None:
            raise ValueError(f"run {run} delivers to {noted}, and RATCHET_MLFLOW_URI is not set: {back}")
        command = shlex.join(["ratchet", "upload", run, "--to", given])
        raise ValueError(
            f"run {run} delivers to {noted or OWN}, and RATCHET_MLFLOW_URI is {given}: {back}, or upload the run there: {command}"
        )


def trouble(uri: str | None) -> str | None:
    """Say in words why nothing can be delivered to an address just now; None where nothing is wrong, or where only trying would tell."""
    if uri is None:
        return None
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in SCHEMES:
        return f"RATCHET_MLFLOW_URI {uri} is no address of an MLflow store: give http://HOST:PORT, or sqlite:///FILE"
    if scheme not in ("http", "https"):
        return None
    try:
        answer = httpx.get(f"{uri}/health", timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"MLflow at {uri} does not answer ({error})"
    return f"MLflow at {uri} answers with status {answer.status_code}" if answer.status_code >= 500 else None


def command(run: str) -> str:
    """The command that delivers what waits."""
    uri = of(run)
    moves = trouble(uri) is not None and urlsplit(uri or "").scheme.partition("+")[0] not in SCHEMES
    return shlex.join(["ratchet", "upload", *([run, "--to", "ADDRESS"] if moves else [])])


def warn_at_start(run: str) -> None:
    """Warn if MLflow is known to be unreachable, so that nothing is uploaded for now; the run continues."""
    if found := trouble(of(run)):
        log.warning("%s: run %s goes on, its steps wait on disk, and `%s` delivers them", found, run, command(run))


def warn_at_end(run: str, waiting: list[Path]) -> None:
    """Say what is not delivered, where the store cannot be reached."""
    if waiting and (found := trouble(of(run))):
        names = ", ".join(str(folder.relative_to(run_folder(run))) for folder in waiting)
        log.warning("%s: not delivered of run %s: %s; `%s` delivers them", found, run, names, command(run))


def _file(run: str) -> Path:
    return RunFolder.of(run).mlflow_address
