"""Open the folders of a run and of a step: their configuration, their id, and when the latest attempt started."""

import logging
import shutil
import time
from typing import Literal

from infra.concurrency.prefetch import Prefetch
from infra.config import DataPart, RunConfig
from infra.config.tools.changes import check_goes_on
from infra.models import base_model
from infra.records import AdapterVersion, Step
from infra.runs import lineage, replay
from infra.runs.manifest import read_manifest
from infra.store import files
from infra.store.files import read_record, write_json
from infra.store.layout import RunFolder, StepFolder, run_folder, step_folder, step_folder_of

log = logging.getLogger(__name__)


def open_config(config: RunConfig, nothing_committed: Literal["refuse", "begin again", "leave"]) -> None:
    """Write the run's configuration, or check that this one may continue the run.

    nothing_committed: What to do with a run of another configuration that has committed nothing.
    """
    path, made = RunFolder.of(config.name).config, lineage.committed_steps(config.name)
    difference = check_begun(config, nothing_committed)
    if made:
        if not path.exists():
            log.warning("%s is gone: it is written again from the manifest of step %d", path, made[0])
            write_json(path, read_manifest(step_folder_of(config.name, made[0])).config.model_dump(mode="json"))
        return
    if not path.exists():
        files.new_id(run_folder(config.name))
        write_json(path, config.model_dump(mode="json"))
        return
    if difference and nothing_committed == "begin again":
        _begin_again(config, difference)


def check_begun(config: RunConfig, nothing_committed: str = "leave") -> ValueError | None:
    """Check that a run, if it was started, may continue with this configuration. Writes nothing.

    nothing_committed: As in open_run.

    Returns:
        How the configurations differ, for a run that may restart because it has committed nothing.

    Raises:
        ValueError: for a run that cannot continue.
    """
    path, committed = RunFolder.of(config.name).config, lineage.committed_steps(config.name)
    if committed:
        check_goes_on(read_manifest(step_folder_of(config.name, committed[-1])).config, config)
        return None
    if not path.exists():
        return None
    cure = "remove it: the run has committed nothing and begins again"
    begun = read_record(path, RunConfig, cure=cure)
    if begun.name != config.name:
        raise ValueError(f"{path} is the configuration of run {begun.name!r}, not of {config.name!r}; {cure}")
    try:
        check_goes_on(begun, config)
    except ValueError as difference:
        if replay.origin_of(config.name) or nothing_committed == "refuse":
            raise
        return difference
    return None


def _begin_again(config: RunConfig, difference: ValueError) -> None:
    """Restart a run that has committed nothing. Results of the old configuration cannot be used with the new one."""
    log.warning("run %s has committed nothing and is begun again, with another configuration: %s", config.name, difference)
    folder = RunFolder.of(config.name)
    for path in folder.path.iterdir():
        if path not in (folder.resolved_config, folder.mlflow_address):  # written for the restart
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    files.new_id(run_folder(config.name))
    write_json(RunFolder.of(config.name).config, config.model_dump(mode="json"))


def check_base(model: str, adapter: AdapterVersion) -> None:
    """Check that the base model is unchanged. Earlier adapters do not fit a folder that was overwritten or a hub model that moved, and what its
    tokenizer and templates make of questions is not what it was.

    model: The run's, by its name or folder now. adapter: One whose record says what it was.

    Raises:
        ValueError: if it is not.
    """
    if (found := base_model.reference(model).sha256) != adapter.base.sha256:
        raise ValueError(
            f"base model {model!r} is not what run {adapter.run!r} was begun with: the digest of its files is {found}, recorded was "
            f"{adapter.base.sha256}. Put the files back (on another machine: those of the first) into {base_model.locate(model)}, or begin "
            "another run"
        )


def training_data(config: RunConfig) -> DataPart:
    """The rows that a run trains on: by the configuration that it was begun with, since another evaluation would leave out other rows."""
    path = RunFolder.of(config.name).config
    return (read_record(path, RunConfig, cure="remove the run") if path.exists() else config).training


def start_step(config: RunConfig, index: int, prefetch: Prefetch | None = None) -> Step:
    """Record a step's configuration, and when this attempt started: with its rollout, if that was prefetched."""
    first = lineage.first_step(config.name)
    begun = Step(run=config.name, index=index, seed=config.seed, first_step=first)
    if not files.id_of(step_folder(begun)):
        files.new_id(step_folder(begun))
    write_json(StepFolder.of(begun).config, config.model_dump(mode="json"))
    started_at = prefetch.started_at(step_folder(begun)) if prefetch else None
    write_json(StepFolder.of(begun).began, {"at": started_at or time.time()})
    log.info("run %s, step %d, in %s", begun.run, begun.index, step_folder(begun))
    return begun
