"""Register adapters as versions of a model in MLflow, named like their run. infra/tracking/mlflow_store.py decides when.

Only versions that carry this run's id count, and only they are ever changed. Others of that name (an earlier run that was removed, a run of
another workspace, a user's model) are left unchanged.

models:/<run>/latest    the latest registered version: MLflow's reserved name, which may not be set as an alias
models:/<run>@best      by evaluation.best_by among evaluated versions, else by the reward of the step that made them
"""

import logging
from typing import TYPE_CHECKING

from infra.config import RunConfig
from infra.records import AdapterVersion
from infra.runs import evaluations
from infra.store.files import read_json, run_id
from infra.store.layout import RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient as MlflowClient
    from mlflow.entities.model_registry import ModelVersion

log = logging.getLogger(__name__)

RUN_TAG, SHA256_TAG, ADAPTER_TAG = "ratchet.run_id", "ratchet.sha256", "ratchet.adapter"
REWARD_TAG, PASS_TAG = "ratchet.reward", "ratchet.pass_at_1"


def register(client: "MlflowClient", run: str, mlflow_run: str, adapter: AdapterVersion, metrics: dict[str, float]) -> None:
    """Register the adapter as a version of the model `<run>`, unless it is one. A version that the store made twice is removed again."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(run)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_registered_model(run)
    known = set[tuple[str, str]]()
    for version in versions_of(client, run):
        if (adapter_of := (version.tags[ADAPTER_TAG], version.tags[SHA256_TAG])) in known:
            log.warning("MLflow made version %s of model %s twice: deleting it", version.version, run)
            client.delete_model_version(run, version.version)
        known.add(adapter_of)
    if (str(adapter.version), adapter.sha256) not in known:
        root = client.get_run(mlflow_run).info.artifact_uri
        tags = {RUN_TAG: run_id(run), SHA256_TAG: adapter.sha256, ADAPTER_TAG: str(adapter.version)}
        tags |= {REWARD_TAG: repr(metrics["reward/mean"])}
        client.create_model_version(
            run, source=f"{root}/adapters/{adapter.version:06d}", run_id=mlflow_run, tags=tags, await_creation_for=0
        )
    _point_best(client, run)


def versions_of(client: "MlflowClient", run: str) -> "list[ModelVersion]":
    """Return this run's versions, in the order in which they were made."""
    mine = run_id(run)
    found = [version for version in client.search_model_versions(f"name = '{run}'") if version.tags.get(RUN_TAG) == mine]
    return sorted(found, key=lambda version: int(version.version))


def note_pass_at_1(client: "MlflowClient", run: str, adapter_sha256: str, pass_at_1: float) -> None:
    """Record the result of the run's own evaluation of an adapter."""
    for version in versions_of(client, run):
        if version.tags[SHA256_TAG] == adapter_sha256:
            client.set_model_version_tag(run, version.version, PASS_TAG, repr(pass_at_1))
    _point_best(client, run)


def _point_best(client: "MlflowClient", run: str) -> None:
    """Set the version that `@best` names."""
    known = versions_of(client, run)
    config = RunConfig.model_validate(read_json(RunFolder.of(run).config))
    evaluated = {version.tags[SHA256_TAG]: version for version in reversed(known) if PASS_TAG in version.tags}
    found = [each for each in evaluations.of_run(run, config.eval_config) if each.adapter_sha256 in evaluated]
    if highest := evaluations.best_of(config.evaluation, found):
        best = evaluated[highest.adapter_sha256]
    elif known:
        best = max(known, key=lambda version: float(version.tags[REWARD_TAG]))
    else:
        return
    client.set_registered_model_alias(run, "best", best.version)
