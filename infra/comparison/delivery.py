"""A comparison in MLflow: one parent run with report and charts, a child run for each engine with its figures step by step."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from infra.comparison.paths import output_folder, state_folder
from infra.comparison.report import Results, label, rows_of
from infra.config.tools.overrides import flattened
from infra.store.files import id_of, new_id, read_json, write_json
from infra.tracking import mlflow_store

if TYPE_CHECKING:
    from infra.tracking.mlflow_store import MlflowClient

log = logging.getLogger(__name__)

EXPERIMENT = "ratchet-engines"
DELIVERED = "mlflow.json"
ID_TAG = "ratchet.comparison_id"


def deliver(results: Results, files: list[Path]) -> str | None:
    """The id of the parent run; None where the store does not take it: figures and files are on disk all the same. Once only."""
    memory = state_folder(results.digest) / DELIVERED
    if memory.exists() and read_json(memory)["uri"] == mlflow_store.uri():
        return str(read_json(memory)["run_id"])
    made = mlflow_store.attempted(lambda client: _deliver(client, results, files))
    if made is not None:
        write_json(memory, {"uri": mlflow_store.uri(), "run_id": made})
    return made


def _deliver(client: "MlflowClient", results: Results, files: list[Path]) -> str:
    experiment = mlflow_store.experiment_id(client, EXPERIMENT)
    tags = {
        "ratchet.comparison": results.digest,
        "ratchet.is_twin": str(any(start.is_twin for start in results.starts)),
        ID_TAG: _id_of(state_folder(results.digest)),
    }
    for begun in client.search_runs([experiment], f"tags.`{ID_TAG}` = '{tags[ID_TAG]}'"):
        log.warning("a delivery that did not end has left run %s: deleting it", begun.info.run_id)
        client.delete_run(begun.info.run_id)
    parent = str(client.create_run(experiment, run_name=results.config.name, tags=tags).info.run_id)
    for name, value in flattened(results.config.model_dump(mode="json")).items():
        client.log_param(parent, name, str(value)[:6000])
    folder = output_folder(results.config)
    for path in files:
        place = path.parent.relative_to(folder).as_posix()
        client.log_artifact(parent, str(path), None if place == "." else place)
    for row in rows_of(results):
        if row.difference_percent is not None:
            client.log_metric(parent, f"difference_percent/{row.metric.name}", row.difference_percent)
    for backend in results.config.backends:
        child = client.create_run(experiment, run_name=label(results, backend), tags=tags | {"mlflow.parentRunId": parent})
        run_id, now = str(child.info.run_id), int(time.time() * 1000)
        for number, step in enumerate(step for step in results.of(backend) if step.is_sound):
            for name, value in step.figures().items():
                client.log_metric(run_id, f"engine/{name}", value, now, number)
        for row in rows_of(results):
            if found := row.summaries[backend]:
                client.log_metric(run_id, f"median/{row.metric.name}", found.median)
        client.log_artifact(run_id, str(folder / f"{backend}_metrics.json"))
        client.set_terminated(run_id)
    client.set_terminated(parent)
    return parent


def _id_of(folder: Path) -> str:
    """The same options and model on another machine are another comparison."""
    if not id_of(folder):
        new_id(folder)
    return id_of(folder)


def engine_runs(digest: str) -> list[dict[str, object]]:
    """A row for each engine of a comparison that the store has: name and medians. Empty where it has none."""

    def found(client: "MlflowClient") -> list[dict[str, object]]:
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            return []
        runs = client.search_runs([experiment.experiment_id], f"tags.`ratchet.comparison` = '{digest}'")
        children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
        return [
            {"engine": run.info.run_name}
            | {name.removeprefix("median/"): value for name, value in run.data.metrics.items() if name.startswith("median/")}
            for run in children
        ]

    return mlflow_store.attempted(found) or []
