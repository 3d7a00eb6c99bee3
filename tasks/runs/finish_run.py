"""Finish a run: report its results, and export its model."""

import logging
import shutil
from pathlib import Path
from typing import Literal

from prefect import task

from infra.config import ExportConfig, RunConfig
from infra.eval_records import RunReport
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.models import base_model
from infra.processes import child_environment, children
from infra.records import AdapterVersion
from infra.reporting import run_page
from infra.runs import evaluations, run_state
from infra.runs.accounting import unused
from infra.runs.evaluations import stalled
from infra.runs.lineage import adapter_at, next_step
from infra.runs.opening import check_base
from infra.settings import CHECKOUT, main_python, settings
from infra.store.files import fresh_folder, publish_folder, read_json, verified_adapter, write_json
from infra.store.layout import ExportFolder, RunFolder, Workspace
from infra.tracking import delivery_report, upload
from tasks.support.artifacts import page_of_this_flow, show_run
from tasks.support.caching import NO_CACHE
from tasks.support.planning.layout import remember_rates

log = logging.getLogger(__name__)

INPUTS_KEY = "inputs_key.json"
MERGE_TIMEOUT_S = 7200


def report_of(config: RunConfig) -> RunReport:
    """Make the run's report from the files on disk."""
    committed = next_step(config.name)
    found = evaluations.of_run(config.name, config.eval_config)
    best = evaluations.best_of(config.evaluation, found)
    return RunReport(
        run=config.name,
        num_steps=committed,
        stopped=stopped_by(config, committed),
        latest=adapter_at(config, committed),
        best=adapter_at(config, best.step if best else committed),
        evaluations=tuple(found),
        others=tuple(evaluations.of_other_sets(config)),
        unused=unused.of_run(config.name),
    )


def stopped_by(config: RunConfig, num_committed: int) -> Literal["all steps made", "asked to stop", "no progress"]:
    """Return why a run ends here."""
    if num_committed >= config.num_steps:
        return "all steps made"
    if run_state.is_asked_to_stop(config.name):
        return "asked to stop"
    return "no progress" if stalled(config, num_committed) else "all steps made"


def export(config: ExportConfig, adapter: AdapterVersion, folder: Path) -> None:
    """Write folder/adapter, and folder/merged if configured. A folder with the same content is left unchanged.

    Raises:
        ValueError: for a base model that has changed, into which an adapter would be merged.
    """
    if config.what == "nothing":
        return
    if adapter.weights is None:
        log.info("nothing to export: the base model itself is the %s", config.which)
        return
    source = verified_adapter(adapter)
    if not _is_made_from(ExportFolder(folder).adapter, adapter):
        staging = fresh_folder(ExportFolder(folder).adapter.with_suffix(".partial"))
        shutil.copyfile(source / ADAPTER_WEIGHTS, staging / ADAPTER_WEIGHTS)
        about = read_json(source / ADAPTER_CONFIG)
        write_json(staging / ADAPTER_CONFIG, about | {"base_model_name_or_path": base_model.public_name(adapter.base.id)})
        _publish(staging, ExportFolder(folder).adapter, adapter)
    if config.what == "merged" and not _is_made_from(ExportFolder(folder).merged, adapter):
        staging = ExportFolder(folder).merged.with_suffix(".partial")
        shutil.rmtree(staging, ignore_errors=True)
        check_base(adapter.base.id, adapter)
        base = base_model.locate(adapter.base.id)
        children.run(
            [
                str(settings().trainer_python or main_python()),
                "-m",
                "infra.megatron.lora.merge",
                str(base),
                str(source),
                str(staging),
            ],
            Workspace.here().logs / f"merge-{adapter.run}.log",
            timeout_s=MERGE_TIMEOUT_S,
            on_line=lambda line: log.info("merge: %s", line),
            cwd=CHECKOUT,
            inherits=child_environment.passed_on(),
        )
        _publish(staging, ExportFolder(folder).merged, adapter)


def check_free(folder: Path) -> None:
    """Make the folder of exports. Raises ValueError if it cannot be made, or if an export would replace something that is not an export."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
    for name in ("adapter", "merged"):
        if (folder / name).exists() and not (folder / name / INPUTS_KEY).exists():
            raise ValueError(f"{folder / name} is there and no export of ours: name another folder, or remove it")


def _is_made_from(folder: Path, adapter: AdapterVersion) -> bool:
    return (folder / INPUTS_KEY).exists() and read_json(folder / INPUTS_KEY) == adapter.model_dump(mode="json")


def _publish(staging: Path, target: Path, adapter: AdapterVersion) -> None:
    write_json(staging / INPUTS_KEY, adapter.model_dump(mode="json"))
    publish_folder(staging, target)
    log.info("adapter %d of run %s is exported to %s", adapter.version, adapter.run, target)


@task(cache_policy=NO_CACHE)
def finish_run(config: RunConfig) -> RunReport:
    """RunConfig -> RunReport. The result is exported when this returns."""
    made = report_of(config)
    if unreached := evaluations.unreached_threshold(config.evaluation, made.evaluations):
        log.warning("%s", unreached)
    export(config.export, made.best if config.export.which == "best" else made.latest, RunFolder.of(config.name).export)
    write_json(RunFolder.of(config.name).report, made.model_dump(mode="json"))
    report = run_page.write_page(made, config, page_of_this_flow())
    remember_rates(config, made.num_steps)
    upload.start()
    delivery_report.log_at_end(config.name)
    show_run(made, report)
    log.info("run %s: %d steps (%s), best is adapter %d", made.run, made.num_steps, made.stopped, made.best.version)
    return made
