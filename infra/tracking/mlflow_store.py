"""The one door to MLflow: what a committed step leaves on disk goes into the store, once, in order.

A step's metrics are a file beside the step before they are rows in a store, and carry the step's own time stamp: delivering them
twice gives the same rows. What a store would make again at each request (runs, versions of a model) is looked for first, by
tags of ours, and made twice only where an answer came so late that it was given up: then the later one is taken out again.
`deliver` waits for the store; a step calls `delivery.start_upload` instead.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from infra.config.tools.overrides import flattened
from infra.services.servers import running_mlflow_url
from infra.settings import settings
from infra.store.digests import sha256_of
from infra.store.files import read_json, read_note, run_id, write_json
from infra.store.layout import DELIVERED, EVALUATION, MANIFEST, PAGE, RunFolder, StepFolder, Workspace, runs_folder
from infra.tracking import experiment_page, mlflow_address, overview, run_tags, step_content

if TYPE_CHECKING:
    from mlflow import MlflowClient as MlflowClient

log = logging.getLogger(__name__)

T = TypeVar("T")
RUN_TAG = "ratchet.run_id"
MAX_PARAMETERS = 100
"""Limit of one request, as set by MLflow."""
NO_PARAMETERS = ("name", "tracking.sweep")
"""They differ from run to run in every experiment, and would be the first axis of every comparison; names and tags say them."""
SHORT_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Limits on MLflow's calls. By default a call to an unavailable store blocks for four minutes."""
NO_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""MLflow's own would send a request again whose answer was lost, and so make things twice."""


def uri(run: str | None = None) -> str:
    """The address that a run began with, or RATCHET_MLFLOW_URI; else the server that quickstart started, else the workspace's sqlite store."""
    given = mlflow_address.of(run) if run else settings().mlflow_uri
    return given or running_mlflow_url() or store_uri()


def store_uri() -> str:
    return f"sqlite:///{settings().workspace}/mlflow/mlflow.db"


def artifact_root() -> Path:
    return Workspace.here().mlflow / "artifacts"


def store_client(run: str | None = None) -> "MlflowClient":
    """The store of a run, or of this environment. One that is away is an error of its requests after a short while; none is sent twice."""
    os.environ.update({name: value for name, value in SHORT_PATIENCE.items() if name not in os.environ} | NO_RETRIES)
    import mlflow

    return mlflow.MlflowClient(tracking_uri=uri(run), registry_uri=uri(run))


def deliver(run: str) -> str | None:
    """Bring every committed step and every evaluation of a run that is not in the store yet into it; gives the MLflow run's id.

    A store that cannot be reached is no error of the step: it is logged, and the next delivery tries again.
    """
    left = waiting(run)
    from mlflow.exceptions import MlflowException

    try:
        Workspace.here().mlflow.mkdir(parents=True, exist_ok=True)
        client = store_client(run)
        mlflow_run = _mlflow_run(client, run)
        left = waiting(run, mlflow_run)  # of another store, or of a run that somebody deleted there, this one has nothing
        for folder in left:
            content = _content(folder)
            step_content.bring(client, run, mlflow_run, folder)
            if folder == left[-1]:  # before it is marked: a delivery that is killed here repeats it
                overview.bring(client, run, mlflow_run, _links(run))
            write_json(folder / DELIVERED, {"run_id": mlflow_run, "uri": uri(run), "content": content})
        # No process stands behind a run between its steps; later steps are added all the same.
        client.set_terminated(mlflow_run, end_time=_last_written_ms(run))
    except (MlflowException, OSError) as error:
        log.warning(
            "MLflow at %s did not take %d steps and evaluations of run %s, they are kept for later: %s",
            uri(run),
            len(left),
            run,
            error,
        )
        return None
    return mlflow_run


def _at_ms(path: Path) -> int:
    """Return when a file was written, in milliseconds since the epoch."""
    return int(path.stat().st_mtime * 1000)


def _last_written_ms(run: str) -> int:
    """Return when the run's latest step, evaluation or summary was written: MLflow's duration of the run ends there."""
    files = RunFolder.of(run)
    written = [*files.steps.glob(f"*/{MANIFEST}"), *files.evaluations.glob(f"*/{EVALUATION}"), *files.summary.path.glob(PAGE)]
    return max(map(_at_ms, written), default=_at_ms(files.config))


def attempted(what: "Callable[[MlflowClient], T]") -> "T | None":
    """What is done with a store, or None where the store does not take it: that is logged, and no error."""
    from mlflow.exceptions import MlflowException

    try:
        Workspace.here().mlflow.mkdir(parents=True, exist_ok=True)
        return what(store_client())
    except (MlflowException, OSError) as error:
        log.warning("MLflow at %s did not take it: %s", uri(), error)
        return None


class Memory(BaseModel):
    """The content of a run's mlflow.json."""

    uri: str
    run_id: str
    experiment_id: str


def known_run(run: str) -> str | None:
    """The id of the MLflow run, once there is one."""
    memory = RunFolder.of(run).mlflow_run
    noted = read_note(memory, Memory)
    return noted.run_id if noted else None


def run_url(mlflow_run: str, run: str) -> str | None:
    """Return the address of an MLflow run's page, where there is a server."""
    noted = _served(run)
    return experiment_page.run_url(uri(run), noted.experiment_id, mlflow_run) if noted else None


def page_url(run: str) -> str | None:
    """Return the address of a run's page in MLflow; None before its first delivery, or where there is no server."""
    noted = _served(run)
    return run_url(noted.run_id, run) if noted else None


def start_page(mlflow_url: str) -> str:
    """Return the address of a server to open first: the runs of the experiment that got a delivery last. MLflow's own first page, and the
    way from it to an experiment, show applications for traces."""
    memories = [memory for path in runs_folder().glob("*") if (memory := RunFolder(path).mlflow_run).exists()]
    noted = [known for path in sorted(memories, key=_at_ms) if (known := read_note(path, Memory)) and known.uri == mlflow_url]
    return experiment_page.runs_url(mlflow_url, noted[-1].experiment_id) if noted else mlflow_url


def _served(run: str) -> Memory | None:
    noted = read_note(RunFolder.of(run).mlflow_run, Memory)
    return noted if noted and noted.uri == uri(run) and noted.uri.startswith("http") else None


def _links(run: str) -> dict[str, str]:
    noted = _served(run)
    if noted is None:
        return {}
    return {
        "All runs": experiment_page.runs_url(noted.uri, noted.experiment_id),
        "Curves of all runs": experiment_page.curves_url(noted.uri, noted.experiment_id),
    }


def deliverable(run: str) -> list[Path]:
    """Folders of what is committed: steps in their order, then evaluations, whose adapters the steps bring, then the run's summary."""
    steps = [path.parent for path in sorted(RunFolder.of(run).steps.glob(f"[0-9]*/{MANIFEST}"))]
    evaluated = [path.parent for path in sorted(RunFolder.of(run).evaluations.glob(f"*/{EVALUATION}"))]
    summary = RunFolder.of(run).summary
    return [*steps, *evaluated, *([summary.path] if summary.page.exists() else [])]


def waiting(run: str, mlflow_run: str | None = None) -> list[Path]:
    """The part of `deliverable` that is not delivered. An evaluation that was made again, or the summary of a longer run, waits again.

    mlflow_run: Only what this one got is delivered; None: whichever got it.
    """
    return [folder for folder in deliverable(run) if not _is_delivered(folder, mlflow_run)]


def num_bytes_waiting(run: str) -> int:
    """Return the size of the steps' files that are not uploaded yet; all other data is small."""
    num_bytes = 0
    for step in (folder for folder in waiting(run) if StepFolder(folder).manifest.exists()):
        for path in (*step_content.artifacts_of(step), *step_content.adapter_files(run, int(step.name) + 1)):
            with suppress(FileNotFoundError):  # retention may run concurrently
                num_bytes += path.stat().st_size
    return num_bytes


def _is_delivered(folder: Path, mlflow_run: str | None) -> bool:
    if (about := read_note(folder / DELIVERED, dict[str, str])) is None:
        return False
    is_what_it_was = StepFolder(folder).manifest.exists() or about["content"] == _content(folder)  # steps do not change
    return is_what_it_was and mlflow_run in (None, about["run_id"])


def _content(folder: Path) -> str:
    """Digest of a folder's report, or of an evaluation; it is written last."""
    written = next((folder / name for name in (PAGE, EVALUATION) if (folder / name).exists()), None)
    return sha256_of(written) if written else ""


def delivered_adapters(run: str) -> set[int]:
    """Versions whose files the run's store has; the adapter that step k made is version k + 1. A store to which the run has just moved has only what
    it got itself."""
    address = mlflow_address.of(run)
    notes = {path: read_note(path, dict[str, str]) for path in RunFolder.of(run).steps.glob(f"[0-9]*/{DELIVERED}")}
    return {int(path.parent.name) + 1 for path, note in notes.items() if note and address in (None, note.get("uri"))}


def _mlflow_run(client: "MlflowClient", run: str) -> str:
    """The MLflow run of a training run, remembered beside the run once all that belongs to its beginning is in the store."""
    from mlflow.entities import Param

    memory = RunFolder.of(run).mlflow_run
    config: dict[str, Any] = read_json(RunFolder.of(run).config)
    experiment = experiment_id(
        client, config["tracking"]["experiment"], is_ours=mlflow_address.of(run) is None, parts=overview.part_names(run)
    )
    found = client.search_runs(
        [experiment], f"tags.`{RUN_TAG}` = '{run_id(run)}'", order_by=["attributes.start_time ASC", "attributes.run_id ASC"]
    )
    ids = [str(entry.info.run_id) for entry in found]
    if not ids:
        ids = [
            str(
                client.create_run(
                    experiment,
                    run_name=run,
                    start_time=_at_ms(RunFolder.of(run).config),
                    tags=run_tags.of_config(config) | {RUN_TAG: run_id(run)},
                ).info.run_id
            )
        ]
    known = known_run(run)
    kept = known if known in ids else ids[0]
    for twin in ids:
        if twin != kept:
            log.warning("MLflow made run %s twice: deleting %s", run, twin)
            client.delete_run(twin)
    noted = read_note(memory, Memory)
    if noted is None or (noted.run_id, noted.uri) != (kept, uri(run)):
        shown = {name: value for name, value in flattened(config).items() if name not in NO_PARAMETERS}
        parameters = [Param(name, str(value)[:6000]) for name, value in sorted(shown.items())]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            client.log_batch(kept, params=parameters[first : first + MAX_PARAMETERS])
        client.log_dict(kept, config, "config.json")
        write_json(memory, {"uri": uri(run), "run_id": kept, "experiment_id": experiment})
    return kept


def experiment_id(client: "MlflowClient", name: str, *, is_ours: bool | None = None, parts: Sequence[str] = ()) -> str:
    """Find or create an experiment, and see that it opens as experiment_page says.

    is_ours: The store is the workspace's own; None: that of RATCHET_MLFLOW_URI decides.
    parts: Names of the parts of a run's reward.
    """
    found = client.get_experiment_by_name(name)
    if found is not None:
        before = found.tags.get(experiment_page.VIEW_TAG)
        if (view := experiment_page.view(parts, before)) != before:
            client.set_experiment_tag(found.experiment_id, experiment_page.VIEW_TAG, view)
        return str(found.experiment_id)
    # A place that both a server of ours and a process without one can write to; another server decides for itself.
    ours = settings().mlflow_uri is None if is_ours is None else is_ours
    location = (artifact_root() / name).as_uri() if ours else None
    tags = {**experiment_page.KIND, experiment_page.VIEW_TAG: experiment_page.view(parts)}
    return str(client.create_experiment(name, artifact_location=location, tags=tags))
