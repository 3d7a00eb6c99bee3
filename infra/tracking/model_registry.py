"""Register adapters as versions of a model in MLflow, named like their run. infra/tracking/mlflow_store.py decides when.

Only some adapters become versions: every `tracking.register_every`-th, the best one, and the last one when the run ends. All adapters are
artifacts of the run. Only versions that carry this run's id count, and only they are ever changed. Others of that name (an earlier run
that was removed, a run of another workspace, a user's model) are left unchanged.

models:/<run>@best         by evaluation.best_by among evaluated versions, else by the reward of the step that made them
models:/<run>@last         the registered version of the latest step. MLflow reserves the name `latest`: it is the version made last
models:/<run>@adapter-10   by the adapter's own number
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from infra.config import RunConfig
from infra.eval_records import Evaluation
from infra.records import StepReport
from infra.runs import evaluations
from infra.store.files import read_json, run_id
from infra.store.layout import RunFolder, StepFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient as MlflowClient
    from mlflow.entities.model_registry import ModelVersion

log = logging.getLogger(__name__)

RUN_TAG, SHA256_TAG, ADAPTER_TAG = "ratchet.run_id", "ratchet.sha256", "ratchet.adapter"
REWARD_TAG, PASS_TAG = "ratchet.reward", "ratchet.pass_at_1"
BEST, LAST = "best", "last"


def addresses(run: str) -> str:
    """Name the addresses of a run's adapters in words."""
    return f"`models:/{run}@{BEST}`, `models:/{run}@{LAST}` (once registered); each step's is under *Artifacts*, `adapters/`"


def after_step(client: "MlflowClient", run: str, mlflow_run: str, version: int) -> None:
    """Register the adapter of a step if its turn has come."""
    every = _config(run).tracking.register_every
    if every and version % every == 0:
        refresh(client, run, mlflow_run, [version])


def after_evaluation(client: "MlflowClient", run: str, mlflow_run: str) -> None:
    """Register the best evaluated adapter, and note the figures of all."""
    best = _best_evaluated(run)
    refresh(client, run, mlflow_run, [best.step] if best else [])


def after_end(client: "MlflowClient", run: str, mlflow_run: str) -> None:
    """Register the last adapter and the best one: by evaluations, or by reward if there are none."""
    reports = _reports(run)
    if not reports:
        return
    best = _best_evaluated(run)
    by_reward = max(reports, key=lambda report: report.metrics["reward/mean"]).adapter.version
    refresh(client, run, mlflow_run, [best.step if best else by_reward, reports[-1].adapter.version])


def refresh(client: "MlflowClient", run: str, mlflow_run: str, wanted: Iterable[int]) -> None:
    """Register adapters that are not registered yet, and bring figures and aliases of all up to date.

    A version that the store made twice is removed again, and so is one of a step that was dropped and made again: its artifacts are the new
    adapter's. An adapter that the store does not have is left out: retention has removed its
    files, and a new store cannot get them.
    """
    known = _without_twins(client, run)
    for version in sorted(set(wanted)):
        report = _report(run, version)
        if report is None or (str(version), report.adapter.sha256) in known:
            continue
        if client.list_artifacts(mlflow_run, _artifacts_of(version)):
            _create(client, run, mlflow_run, report)
    if registered := versions_of(client, run):
        _note_figures(client, run, registered)
        _set_aliases(client, run, registered)


def versions_of(client: "MlflowClient", run: str) -> "list[ModelVersion]":
    """Return this run's versions, in the order in which they were made."""
    mine = run_id(run)
    found = [version for version in client.search_model_versions(f"name = '{run}'") if version.tags.get(RUN_TAG) == mine]
    return sorted(found, key=lambda version: int(version.version))


def _without_twins(client: "MlflowClient", run: str) -> set[tuple[str, str]]:
    """Delete versions that the store made twice, or whose step was made again. Returns number and digest of the registered adapters."""
    known = set[tuple[str, str]]()
    for version in versions_of(client, run):
        adapter = (version.tags[ADAPTER_TAG], version.tags[SHA256_TAG])
        report = _report(run, int(adapter[0]))
        is_replaced = report is not None and report.adapter.sha256 != adapter[1]
        if adapter in known or is_replaced:
            why = "is of a step that was made again" if is_replaced else "was made twice by MLflow"
            log.warning("version %s of model %s %s: deleting it", version.version, run, why)
            client.delete_model_version(run, version.version)
        else:
            known.add(adapter)
    return known


def _create(client: "MlflowClient", run: str, mlflow_run: str, report: StepReport) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(run)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_registered_model(run)
    adapter = report.adapter
    tags = {RUN_TAG: run_id(run), SHA256_TAG: adapter.sha256, ADAPTER_TAG: str(adapter.version)}
    tags |= {REWARD_TAG: repr(report.metrics["reward/mean"])}
    source = f"{client.get_run(mlflow_run).info.artifact_uri}/{_artifacts_of(adapter.version)}"
    client.create_model_version(run, source=source, run_id=mlflow_run, tags=tags, await_creation_for=0)


def _note_figures(client: "MlflowClient", run: str, known: "list[ModelVersion]") -> None:
    """Write the figures of each version's own evaluation, and what it is, next to it."""
    scores = {each.adapter_sha256: each.pass_at_1 for each in _evaluated(run)}
    for version in known:
        tags, score = version.tags, scores.get(version.tags[SHA256_TAG])
        if score is not None and tags.get(PASS_TAG) != repr(score):
            client.set_model_version_tag(run, version.version, PASS_TAG, repr(score))
        number = int(tags[ADAPTER_TAG])
        about = f"Adapter {number} of run {run}, made by step {number - 1}: mean reward {float(tags[REWARD_TAG]):.3f}"
        about += f", held-out pass@1 {score:.3f}" if score is not None else ""
        if version.description != about:
            client.update_model_version(run, version.version, about)


def _set_aliases(client: "MlflowClient", run: str, known: "list[ModelVersion]") -> None:
    """Set `best`, `last` and the name of each version."""
    wanted = {f"adapter-{version.tags[ADAPTER_TAG]}": version for version in known}
    latest = max((report.adapter.version for report in _reports(run)), default=0)
    known = [version for version in known if int(version.tags[ADAPTER_TAG]) <= latest]  # the steps of others were dropped
    if not known:
        return
    by_digest = {version.tags[SHA256_TAG]: version for version in reversed(known)}
    found = [each for each in _evaluated(run) if each.adapter_sha256 in by_digest]
    highest = evaluations.best_of(_config(run).evaluation, found)
    wanted[LAST] = max(known, key=lambda version: int(version.tags[ADAPTER_TAG]))
    wanted[BEST] = (
        by_digest[highest.adapter_sha256] if highest else max(known, key=lambda version: float(version.tags[REWARD_TAG]))
    )
    present = client.get_registered_model(run).aliases
    for alias, version in wanted.items():
        if present.get(alias) != version.version:
            client.set_registered_model_alias(run, alias, version.version)


def _artifacts_of(version: int) -> str:
    return f"adapters/{version:06d}"


def _config(run: str) -> RunConfig:
    return RunConfig.model_validate(read_json(RunFolder.of(run).config))


def _report(run: str, version: int) -> StepReport | None:
    """Return the report of the committed step that made an adapter."""
    step = StepFolder.at(run, version - 1)
    return StepReport.model_validate(read_json(step.report)) if step.manifest.exists() else None


def _reports(run: str) -> list[StepReport]:
    versions = sorted(int(path.name) + 1 for path in RunFolder.of(run).steps.glob("[0-9]*"))
    return [report for version in versions if (report := _report(run, version))]


def _evaluated(run: str) -> list[Evaluation]:
    """Return the run's own evaluations of adapters that its steps made."""
    found = evaluations.of_run(run, _config(run).eval_config)
    return [each for each in found if (made := _report(run, each.step)) and made.adapter.sha256 == each.adapter_sha256]


def _best_evaluated(run: str) -> Evaluation | None:
    return evaluations.best_of(_config(run).evaluation, _evaluated(run))
