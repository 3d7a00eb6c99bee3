"""The one door to MLflow: what a committed step leaves on disk goes into the store, once, in order.

A step's metrics are a file beside the step before they are rows in a store, and carry the step's own time stamp: delivering them
twice gives the same rows. A store that is away costs a warning; what it missed is delivered with the next step.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.files import adapter_folder, read_json, run_folder, write_json
from infra.records import AdapterVersion
from infra.services import running_mlflow_url
from infra.settings import settings

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

DELIVERED = "delivered.json"
STEP_ARTIFACTS = ("manifest.json", "config.json", "report.json", "assembled.parquet", "train/result.json", "train/trainer.log")
SHORT_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""By default a call to a store that is away blocks for four minutes."""


def uri() -> str:
    """RATCHET_MLFLOW_URI, else the server that quickstart started, else the workspace's own sqlite store."""
    return settings().mlflow_uri or running_mlflow_url() or store_uri()


def store_uri() -> str:
    return f"sqlite:///{settings().workspace}/mlflow/mlflow.db"


def artifact_root() -> Path:
    return settings().workspace / "mlflow" / "artifacts"


def deliver(run: str) -> str | None:
    """Bring every committed step of a run that is not in the store yet into it; gives the MLflow run's id.

    A store that cannot be reached is no error of the step: it is logged, and the next delivery tries again.
    """
    waiting = [step for step in sorted((run_folder(run) / "steps").glob("[0-9]*")) if _is_waiting(step)]
    os.environ.update({name: value for name, value in SHORT_PATIENCE.items() if name not in os.environ})
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        (settings().workspace / "mlflow").mkdir(parents=True, exist_ok=True)
        client = mlflow.MlflowClient(tracking_uri=uri(), registry_uri=uri())
        run_id = _run_id(client, run)
        for step in waiting:
            _deliver_step(client, run, run_id, step)
            write_json(step / DELIVERED, {"run_id": run_id, "uri": uri()})
        client.set_terminated(run_id)  # no process stands behind a run between its steps; later steps are added all the same
    except (MlflowException, OSError) as error:
        log.warning("MLflow at %s did not take %d steps of run %s, they are kept for later: %s", uri(), len(waiting), run, error)
        return None
    return run_id


def run_url(run_id: str, run: str) -> str | None:
    """The page of an MLflow run, where there is a server."""
    if not uri().startswith("http"):
        return None
    return f"{uri()}/#/experiments/{read_json(run_folder(run) / 'mlflow.json')['experiment_id']}/runs/{run_id}"


def _is_waiting(step: Path) -> bool:
    return (step / "manifest.json").exists() and not (step / DELIVERED).exists()


def _run_id(client: "MlflowClient", run: str) -> str:
    """The MLflow run of a training run: made once, remembered beside the run."""
    memory = run_folder(run) / "mlflow.json"
    if memory.exists() and read_json(memory)["uri"] == uri():
        return str(read_json(memory)["run_id"])
    config: dict[str, Any] = read_json(run_folder(run) / "config.json")
    experiment_id = _experiment_id(client, config["tracking"]["experiment"])
    made = client.create_run(experiment_id, run_name=run, tags=_tags(config))
    write_json(memory, {"uri": uri(), "run_id": made.info.run_id, "experiment_id": experiment_id})
    from mlflow.entities import Param

    client.log_batch(
        made.info.run_id, params=[Param(name, str(value)[:6000]) for name, value in sorted(flattened(config).items())]
    )
    client.log_dict(made.info.run_id, config, "config.json")
    return str(made.info.run_id)


def _experiment_id(client: "MlflowClient", name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # A place that both a server of ours and a process without one can write to; another server decides for itself.
    ours = settings().mlflow_uri is None
    return str(client.create_experiment(name, artifact_location=(artifact_root() / name).as_uri() if ours else None))


def _tags(config: dict[str, Any]) -> dict[str, str]:
    return {
        "ratchet.run": config["name"],
        "ratchet.model": config["model"],
        "ratchet.data": config["data"]["source"],
        "ratchet.engine": config["engine"]["kind"],
        "ratchet.algorithm": config["batch"]["advantage"],
    }


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer": {"lora": {"rank": 8}}} -> {"trainer.lora.rank": 8}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _deliver_step(client: "MlflowClient", run: str, run_id: str, step: Path) -> None:
    from mlflow.entities import Metric

    report, committed = read_json(step / "report.json"), read_json(step / "manifest.json")
    at_ms, number = int(committed["committed_at"] * 1000), report["step"]
    client.log_batch(run_id, metrics=[Metric(name, value, at_ms, number) for name, value in sorted(report["metrics"].items())])
    for name in STEP_ARTIFACTS:
        if (step / name).exists():
            client.log_artifact(run_id, str(step / name), f"steps/{number:06d}")
    adapter = AdapterVersion.model_validate(report["adapter"])
    for path in sorted(adapter_folder(run, adapter.version).glob("adapter_*")):
        client.log_artifact(run_id, str(path), f"adapters/{adapter.version:06d}")
    _log_data(client, run_id, committed)
    _register(client, run, run_id, adapter, report["metrics"])


def _log_data(client: "MlflowClient", run_id: str, manifest: dict[str, Any]) -> None:
    """The data set as an input of the run; MLflow knows it by its digest, so saying it again changes nothing."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    data = manifest["config"]["data"]
    digest = manifest["prompts"]["dataset_fingerprint"][:36]
    source = Dataset(
        name=Path(data["source"]).name, digest=digest, source_type="ratchet", source=f'{{"source": "{data["source"]}"}}'
    )
    client.log_inputs(run_id, [DatasetInput(source, [InputTag("mlflow.data.context", "training")])])


def _register(client: "MlflowClient", run: str, run_id: str, adapter: AdapterVersion, metrics: dict[str, float]) -> None:
    """The adapter as a version of the registered model `<run>`: `models:/<run>/latest`, and `@best` by the reward of the step
    that made it. (MLflow keeps `latest` for itself: it may not be set as an alias.)"""
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(run)
    except MlflowException:
        client.create_registered_model(run)
    known = {version.tags.get("ratchet.sha256"): version for version in client.search_model_versions(f"name = '{run}'")}
    if adapter.sha256 not in known:
        root = client.get_run(run_id).info.artifact_uri
        tags = {
            "ratchet.sha256": adapter.sha256,
            "ratchet.adapter": str(adapter.version),
            "ratchet.reward": repr(metrics["reward/mean"]),
        }
        known[adapter.sha256] = client.create_model_version(
            run, source=f"{root}/adapters/{adapter.version:06d}", run_id=run_id, tags=tags, await_creation_for=0
        )
    best = max(known.values(), key=lambda version: float(version.tags["ratchet.reward"]))
    client.set_registered_model_alias(run, "best", best.version)
