"""Start a new run with a step of another run, after the pre-flight check."""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prefect import task

from infra.config import RunConfig
from infra.config.tools.names import RUN_NAME
from infra.config.tools.overrides import with_overrides
from infra.data.prompt_batch import DrawnFrom
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.models import base_model
from infra.records import AdapterVersion, File, PromptBatch, Step
from infra.rewards.judges.ledger import set_aside_payments
from infra.runs.lineage import base_version, committed_steps
from infra.runs.manifest import Manifest, ReplayedFrom, changes, differences, environment, products, read_manifest
from infra.runs.opening import start_step
from infra.runs.replay import Origin, ReusedRecords, TaskName, check_changes, files_in, kept_of, moved, place_in, tasks_from
from infra.store import files
from infra.store.digests import sha256_of
from infra.store.files import DigestMismatch, read_json, verified, write_json
from infra.store.layout import RunFolder, StepFolder, run_folder, runs_folder, step_folder_of
from infra.telemetry import program_versions
from tasks.support.caching import NO_CACHE
from tasks.support.preflight import check

log = logging.getLogger(__name__)


def committed_step(run: str, step: int) -> Path:
    """Return the folder of a step that can be replayed.

    Raises:
        ValueError: for a run or a step that does not exist.
    """
    if not RUN_NAME.fullmatch(run) or not run_folder(run).is_dir():
        known = sorted(path.name for path in runs_folder().glob("[!.]*"))
        raise ValueError(f"run {run!r} is unknown; known in {runs_folder()} are {', '.join(known) or 'none'}")
    folder = step_folder_of(run, step)
    if not StepFolder(folder).manifest.exists():
        known = [str(number) for number in committed_steps(run)]
        raise ValueError(f"step {step} of run {run!r} is not committed; committed are {', '.join(known) or 'none'}")
    return folder


def changed_config(before: RunConfig, name: str, overrides: list[str]) -> RunConfig:
    """Apply overrides to the configuration. Raises ValueError for an invalid change or run name."""
    config = with_overrides(before, overrides, name=name)
    if config.name != name:
        raise ValueError(f"the new run has the name {name!r}, it cannot be set to {config.name!r} as well")
    return config


def starting_adapter(manifest: Manifest, config: RunConfig, first: TaskName) -> AdapterVersion:
    """Return the adapter from which the new run starts.

    Raises:
        ValueError: for a base model that differs from the recorded one although it may not.
    """
    before, base = manifest.adapter_in, base_model.reference(config.model)
    if base.sha256 != before.base.sha256:
        _check_other_base(manifest, config, first, base.sha256)
    return base_version(config) if before.weights is None else moved(before, config.name).model_copy(update={"base": base})


def _check_other_base(manifest: Manifest, config: RunConfig, first: TaskName, found: str) -> None:
    before = manifest.adapter_in
    digests = f"its digest is {found}, recorded was {before.base.sha256}"
    if config.model == manifest.config.model:
        raise ValueError(
            f"base model {config.model!r} is not the one that the step was made with: {digests}; model=FOLDER names another place"
        )
    if before.weights:
        raise ValueError(
            f"model = {config.model!r} cannot be: adapter {before.version} was made for another base model; {digests}"
        )
    if first != "draw_prompts":
        raise ValueError(
            f"model = {config.model!r} changes what draw_prompts made, which a replay from {first} takes over ({digests}): "
            "replay from draw_prompts to change it"
        )


def _check_sampler(manifest: Manifest, first: TaskName) -> None:
    sampler, own = manifest.rollouts.adapter_version, manifest.adapter_in.version
    if manifest.config.trainer.loss.correction.max_staleness and sampler != own and first in ("draw_prompts", "roll_out"):
        raise ValueError(
            f"step {manifest.step} of run {manifest.run!r} starts from adapter {own} and was sampled by adapter {sampler} "
            "(trainer.loss.correction.max_staleness), which a new run that begins with this step has not: replay it from score, assemble or train"
        )
    if manifest.prompts.num_begun_prompts and first in ("draw_prompts", "roll_out"):
        raise ValueError(
            f"step {manifest.step} of run {manifest.run!r} goes on with {manifest.prompts.num_begun_prompts} groups that the step before has begun "
            "(data.partial_rollouts), which a new run that begins with this step has not: replay it from score, assemble or train"
        )
    if manifest.rollouts.num_older_tokens and first in ("draw_prompts", "roll_out"):
        raise ValueError(
            f"step {manifest.step} of run {manifest.run!r} has {manifest.rollouts.num_older_tokens} tokens of the adapter before "
            f"{manifest.rollouts.adapter_version} (trainer.loss.correction.in_flight_updates), which a new run that begins with this step has not: "
            "replay it from score, assemble or train"
        )


def check_files(taken: list[File]) -> None:
    """Raises ValueError for a file that does not match its record; names it."""
    for file in taken:
        try:
            verified(file)
        except DigestMismatch as error:
            raise ValueError(f"cannot be replayed: {error}") from error


def is_begun(origin: Origin, config: RunConfig) -> bool:
    """Whether this same replay was started before and is not committed. It is then resumed.

    Raises:
        ValueError: if the name belongs to any other run.
    """
    files_of = RunFolder.of(config.name)
    if not files_of.path.exists():
        return False
    begun = Origin.model_validate(read_json(files_of.origin)) if files_of.origin.exists() else None
    if begun is None or _identity(begun) != _identity(origin) or RunConfig.model_validate(read_json(files_of.config)) != config:
        raise ValueError(f"run {config.name!r} exists already: give the new run another name")
    if files_of.step(origin.replayed_from.step).manifest.exists():
        raise ValueError(f"run {config.name!r} exists already, this replay is committed in it: give the new run another name")
    return True


def _identity(origin: Origin) -> dict[str, object]:
    """Return the identity of a replay: everything except the state of code and machine at its start."""
    return origin.model_dump(exclude={"replayed_from": {"differences"}})


def found_run(origin: Origin, config: RunConfig, taken: list[File], prompts: PromptBatch | None) -> None:
    """Make the new run's folder atomically, with copies of the reused files.

    prompts: Those that are taken over: the run's next steps must draw from the same data set. None: it draws its own.
    """
    staging = files.fresh_folder(runs_folder() / f".{config.name}.partial")
    take_over(taken, staging)
    write_json(RunFolder(staging).config, config.model_dump(mode="json"))
    write_json(RunFolder(staging).origin, origin.model_dump(mode="json"))
    if prompts and prompts.rows:  # an older version counted none
        drawn = DrawnFrom(sha256=prompts.dataset_fingerprint, rows=prompts.rows)
        write_json(RunFolder(staging).dataset_fingerprint, drawn.model_dump())
    files.new_id(staging)
    set_aside_payments(config.name)
    files.publish_folder(staging, run_folder(config.name))


def take_over(taken: list[File], folder: Path) -> None:
    """Copy the reused files into the folder of a run, as far as they are not there: a drop of the replayed step removes them."""
    for file in taken:
        source, target = files.path_of(file), place_in(folder, file)
        pairs = [(source, target)]
        if target.name == ADAPTER_WEIGHTS:  # the record may not include its configuration
            pairs.append((source.with_name(ADAPTER_CONFIG), target.with_name(ADAPTER_CONFIG)))
        for original, copy in pairs:
            if not copy.exists():
                files.write_by(partial(shutil.copyfile, original), copy, what=f"a copy of {original}")


def program_differences(manifest: Manifest, config: RunConfig, first: TaskName) -> tuple[str, ...]:
    """Return lines for the differences between the programs that will run again and those that ran then."""
    samples_again = first in ("draw_prompts", "roll_out") and config.engine.kind == manifest.engine.kind
    engine = program_versions.of_engine(config.engine.kind) if samples_again else manifest.engine.versions
    return (
        *changes(f"engine {manifest.engine.kind}", manifest.engine.versions, engine),
        *changes("trainer", manifest.trainer.versions, program_versions.of_trainer()),
    )


def source_of(folder: Path, manifest: Manifest, config: RunConfig, first: TaskName, overrides: list[str]) -> ReplayedFrom:
    return ReplayedFrom(
        run=manifest.run,
        step=manifest.step,
        manifest_sha256=sha256_of(StepFolder(folder).manifest),
        from_task=first,
        overrides=tuple(overrides),
        differences=(*differences(manifest, environment()), *program_differences(manifest, config, first)),
    )


class Replay(NamedTuple):
    """A replay that has passed its checks."""

    config: RunConfig
    origin: Origin
    kept: ReusedRecords
    taken: list[File]
    """Files of the old run that are copied to the new one."""
    is_begun: bool


def plan_replay(run: str, step: int, first: str, name: str, overrides: list[str], *, checks: bool = True) -> Replay:
    """Plan a replay. Raises ValueError for anything that cannot work; starts and writes nothing.

    checks: False if the configuration has been checked already.
    """
    again = tasks_from(first)
    folder = committed_step(run, step)
    manifest = read_manifest(folder)
    _check_sampler(manifest, again[0])
    config = changed_config(manifest.config, name, overrides)
    changed = check_changes(manifest.config, config, again[0], manifest.adapter_in)
    if checks:  # its adapter comes from the old run, not from where that one started
        check(config.but(trainer=config.trainer.but(lora=config.trainer.lora.but(start_from=None))), again)
    adapter = starting_adapter(manifest, config, again[0])
    changed += ["model"] if adapter.base.sha256 != manifest.adapter_in.base.sha256 else []
    origin = Origin(
        replayed_from=source_of(folder, manifest, config, again[0], overrides),
        adapter=adapter,
        changed=tuple(changed),
        model_moved=adapter.base.id != manifest.adapter_in.base.id,
        digests=products(manifest),
        pass_rates=moved(manifest.prompts, name).pass_rates if config.data.curriculum != "none" else None,
        engine=None if "roll_out" in again else manifest.engine,
        reward_source=None if "score" in again else manifest.reward_source,
    )
    kept = kept_of(manifest, again[0], name)
    taken = files_in(manifest.adapter_in, *(getattr(manifest, receipt) for receipt, value in kept if value))
    if origin.pass_rates and manifest.prompts.pass_rates and not kept.prompts:
        taken.append(manifest.prompts.pass_rates)
    begun = is_begun(origin, config)
    if not begun:
        check_files(taken)
    return Replay(config, origin, kept, taken, begun)


@task(cache_policy=NO_CACHE)
def begin_replay(
    run: str, step: int, first: str, name: str, overrides: list[str]
) -> tuple[RunConfig, Step, AdapterVersion, ReusedRecords]:
    """A committed step -> the inputs of the new run's first step: configuration, step, adapter, and the reused records. The flow has
    called `plan_replay` as its pre-flight check.

    Raises:
        ValueError: for anything that cannot work. Nothing was started or written then.
    """
    plan = plan_replay(run, step, first, name, overrides, checks=False)
    for difference in plan.origin.replayed_from.differences:
        log.warning("not as it was when step %d of run %s was made: %s", step, run, difference)
    if plan.is_begun:
        take_over(plan.taken, run_folder(name))
    else:
        found_run(plan.origin, plan.config, plan.taken, plan.kept.prompts)
    log.info("replay of step %d of run %s from %s, as run %s", step, run, first, name)
    return plan.config, start_step(plan.config, step), plan.origin.adapter, plan.kept
