"""Content of a step, an evaluation or a run's summary in MLflow. infra/tracking/mlflow_store.py decides when, and records that it is there.

All of it can be repeated: it gives the same rows, files, tags and inputs.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.records import AdapterVersion
from infra.runs import evaluations
from infra.store.files import read_json
from infra.store.layout import DELIVERED, EvaluationFolder, RunFolder, StepFolder, adapter_folder
from infra.telemetry import system_metrics
from infra.tracking import model_registry, run_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient as MlflowClient

MAX_METRICS = 1000
"""Metrics in one request, as limited by MLflow."""


def bring(client: "MlflowClient", run: str, mlflow_run: str, folder: Path) -> None:
    """Upload the content of a folder: that of a step, an evaluation or the summary."""
    if folder == RunFolder.of(run).summary.path:
        _bring_summary(client, run, mlflow_run, folder)
    elif EvaluationFolder(folder).record.exists():
        _bring_evaluation(client, run, mlflow_run, folder)
    else:
        _bring_step(client, run, mlflow_run, folder)


def artifacts_of(step: Path) -> list[Path]:
    files = StepFolder(step)
    sent = [files.manifest, files.replay, files.config, files.report, files.assembled, files.train.result, files.train.log]
    return [path for path in (*sent, files.draws, files.page, files.timeline, files.system_metrics) if path.exists()]


def adapter_files(run: str, version: int) -> list[Path]:
    return sorted(adapter_folder(run, version).glob("adapter_*"))


def _bring_step(client: "MlflowClient", run: str, mlflow_run: str, step: Path) -> None:
    from mlflow.entities import Metric, RunTag

    report, committed = read_json(StepFolder(step).report), read_json(StepFolder(step).manifest)
    at_ms, number = int(committed["committed_at"] * 1000), report["step"]
    client.log_batch(
        mlflow_run,
        metrics=[Metric(name, value, at_ms, number) for name, value in sorted(report["metrics"].items())],
        tags=[RunTag(name, value) for name, value in run_tags.of_manifest(committed).items()],
    )
    if plan := committed.get("colocation"):
        client.set_tag(mlflow_run, "ratchet.colocation", f"{plan['colocation']}: {plan['reason']}")
    for path in artifacts_of(step):
        client.log_artifact(mlflow_run, str(path), f"steps/{number:06d}")
    adapter = AdapterVersion.model_validate(report["adapter"])
    for path in adapter_files(run, adapter.version):
        client.log_artifact(mlflow_run, str(path), f"adapters/{adapter.version:06d}")
    _log_machine_load(client, mlflow_run, step, number)
    _log_data(client, mlflow_run, committed)
    model_registry.after_step(client, run, mlflow_run, adapter.version)


def _bring_evaluation(client: "MlflowClient", run: str, mlflow_run: str, folder: Path) -> None:
    """Log metrics at the adapter's version. An evaluation other than the run's own gets its own metric names, so that no curve mixes two."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

    content = read_json(EvaluationFolder(folder).record)
    made, at_ms = Evaluation.model_validate(content["record"]), int(content["at"] * 1000)
    sets = RunConfig.model_validate(read_json(RunFolder.of(run).config)).eval_configs.values()
    own = any(evaluations.is_of(made, each) for each in sets)
    names = {name: name if own else name.replace("eval/", f"eval_{made.eval_digest[:8]}/", 1) for name in made.metrics}
    time_name = f"time/evaluate{f'_{made.set_name}' if made.set_name else ''}_s"
    figures = {names[name]: value for name, value in made.metrics.items()} | {time_name: content["seconds"]}
    client.log_batch(mlflow_run, metrics=[Metric(name, value, at_ms, made.step) for name, value in sorted(figures.items())])
    client.log_artifact(mlflow_run, str(EvaluationFolder(folder).record), f"evaluations/{folder.name}")
    for path in sorted(EvaluationFolder(folder).inspect.glob("*/*.eval")):
        client.log_artifact(mlflow_run, str(path), f"evaluations/{folder.name}/{path.parent.name}")
    data = content["eval_config"]["data"]
    if inspect := content["eval_config"].get("inspect"):
        data = {"source": inspect, "split": "inspect"}
    source = Dataset(
        name=f"{Path(data['source']).name}-{data['split']}"[:500],
        digest=made.eval_digest,
        source_type="ratchet",
        source=json.dumps({"source": data["source"], "split": data["split"]}),
    )
    client.log_inputs(mlflow_run, [DatasetInput(source, [InputTag("mlflow.data.context", "evaluation")])])
    if own or any(evaluations.is_of(made, each) for each in model_registry.config_of(run).eval_configs.values()):
        model_registry.after_evaluation(client, run, mlflow_run)


def _bring_summary(client: "MlflowClient", run: str, mlflow_run: str, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name != DELIVERED:
            client.log_artifact(mlflow_run, str(path), folder.name)
    model_registry.after_end(client, run, mlflow_run)


def _log_data(client: "MlflowClient", mlflow_run: str, manifest: dict[str, Any]) -> None:
    """Log the data set as an input of the run. MLflow identifies it by its digest, so repeating it changes nothing."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    data = manifest["config"]["data"]
    digest = manifest["prompts"]["dataset_fingerprint"][:36]
    source = Dataset(
        name=Path(data["source"]).name,
        digest=digest,
        source_type="ratchet",
        source=json.dumps({"source": data.get("sources") or data["source"]}),
    )
    client.log_inputs(mlflow_run, [DatasetInput(source, [InputTag("mlflow.data.context", "training")])])


def _log_machine_load(client: "MlflowClient", mlflow_run: str, step: Path, number: int) -> None:
    """Log system metrics, with MLflow's names and their own time stamps, so that its page shows them as system metrics."""
    from mlflow.entities import Metric

    if not StepFolder(step).system_metrics.exists():
        return
    rows: list[system_metrics.Row] = read_json(StepFolder(step).system_metrics)
    metrics = [
        Metric(name, value, int(row[system_metrics.AT] * 1000), number)
        for row in rows
        for name, value in sorted(row.items())
        if name != system_metrics.AT
    ]
    for first in range(0, len(metrics), MAX_METRICS):
        client.log_batch(mlflow_run, metrics=metrics[first : first + MAX_METRICS])
