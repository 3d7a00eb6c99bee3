"""The chain of a run's committed steps: step k starts from adapter k and makes adapter k+1. The manifest is authoritative.

runs/<run>/steps/000003/manifest.json: step 3 is committed, and made adapters/000004
"""

import logging
import shutil
from pathlib import Path

from infra.config import RunConfig
from infra.models import base_model
from infra.records import AdapterVersion
from infra.runs import lineage, replay, start_adapter
from infra.runs.manifest import Manifest, read_manifest
from infra.store.files import DigestMismatch, verified, verified_adapter
from infra.store.layout import RunFolder, StepFolder, adapter_folder, step_folder_of

log = logging.getLogger(__name__)


def committed_steps(run: str) -> list[int]:
    """Return the numbers of the committed steps, ascending."""
    folders = RunFolder.of(run).steps.glob("[0-9]*")
    return sorted(int(folder.name) for folder in folders if folder.name.isdecimal() and StepFolder(folder).manifest.exists())


def first_step(run: str) -> int:
    """Return the number of a run's first step: 0, or the replayed step of a run that a replay started."""
    origin = replay.origin_of(run)
    return origin.replayed_from.step if origin else 0


def next_step(run: str) -> int:
    """Return the number of the first step that is not committed.

    Raises:
        ValueError: if a later one is committed; tells what to do about the gap.
    """
    found, first = committed_steps(run), first_step(run)
    following = next((step for step in range(first, first + len(found) + 1) if step not in found), first)
    if later := [step for step in found if step > following]:
        raise ValueError(
            f"run {run!r} has no committed step {following}, but step {later[0]}: put {step_folder_of(run, following)} back, or drop what "
            f"came after it and make it again: ratchet drop {run} --from {following}"
        )
    return following


def adapter_after(run: str, step: int) -> AdapterVersion:
    """Return the adapter that a committed step made.

    Raises:
        ValueError: for a manifest that cannot be read, or is that of another step; names the file.
    """
    return _manifest_of(run, step).adapter_out


def _manifest_of(run: str, step: int) -> Manifest:
    folder = StepFolder.at(run, step)
    found = read_manifest(folder.path)
    if (found.run, found.step, found.adapter_out.version) != (run, step, step + 1):
        raise ValueError(
            f"{folder.manifest} is that of step {found.step} of run {found.run!r}, which made adapter {found.adapter_out.version}, not of step "
            f"{step} of run {run!r}: put the right file back, or drop the step: ratchet drop {run} --from {step}"
        )
    return found


def check(run: str) -> None:
    """Read all manifests of a run.

    Raises:
        ValueError: for a gap, or for a manifest that cannot be read or does not continue the one before; names the file.
    """
    before: AdapterVersion | None = None
    for step in range(first_step(run), next_step(run)):
        found = _manifest_of(run, step)
        if before and (found.adapter_in.version, found.adapter_in.sha256) != (before.version, before.sha256):
            raise ValueError(
                f"{StepFolder.at(run, step).manifest}: step {step} started from adapter {found.adapter_in.version} ({found.adapter_in.sha256}), "
                f"the step before made adapter {before.version} ({before.sha256}): put the right file back, or drop the steps from there on: "
                f"ratchet drop {run} --from {step}"
            )
        before = found.adapter_out


def check_not_recorded(run: str, version: int, sha256: str) -> None:
    """Check that writing an adapter does not replace one that a committed step made.

    Raises:
        DigestMismatch: if a manifest records this version with another digest.
    """
    if version - 1 in committed_steps(run) and (known := adapter_after(run, version - 1)).sha256 != sha256:
        raise DigestMismatch(
            f"{adapter_folder(run, version)} holds adapter {version} of a committed step with SHA-256 {known.sha256}; another one with {sha256} "
            "was made and does not replace it"
        )


def drop(run: str, step: int) -> list[Path]:
    """Remove the steps of a run from `step` on, with their adapters and these adapters' evaluations. Returns the removed paths.

    The last step is removed first, so an interruption leaves no gap. What names an adapter goes before the step that made it: an evaluation that
    is left over would count for the adapter that is made in its place.

    Raises:
        ValueError: if the run has no such step, or cannot continue from there. Nothing was removed then.
    """
    removed = []
    for number in droppable(run, step):
        folder = step_folder_of(run, number)
        for evaluation in RunFolder.of(run).evaluations.glob(f"{number + 1:06d}-*"):
            shutil.rmtree(evaluation)
            removed.append(evaluation)
        StepFolder(folder).manifest.unlink(missing_ok=True)
        for each in (adapter_folder(run, number + 1), folder):
            if each.exists():
                shutil.rmtree(each)
                removed.append(each)
    RunFolder.of(run).report.unlink(missing_ok=True)
    return removed


def droppable(run: str, step: int) -> range:
    """Return the numbers of the steps that `drop` removes, the last one first. Raises ValueError as `drop` does."""
    steps = [int(path.name) for path in RunFolder.of(run).steps.glob("[0-9]*") if path.name.isdecimal()]
    doomed = range(max(steps, default=-1), step - 1, -1)
    if step < first_step(run) or not doomed:
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(f"run {run!r} has no step {step} that could be dropped; its steps are {known}")
    _check_can_go_on(run, step)
    return doomed


def _check_can_go_on(run: str, step: int) -> None:
    """Check that the adapter from which the step starts is complete, and that those which sample for it and the steps after it can be served."""
    if step == first_step(run) or step - 1 not in committed_steps(run):
        return
    before = _manifest_of(run, step - 1)
    oldest = max(first_step(run) + 1, step - before.config.trainer.loss.correction.max_staleness)
    try:
        for file in before.adapter_out.files:
            verified(file)
        for version in range(oldest, step):
            verified_adapter(adapter_after(run, version - 1))
    except DigestMismatch as error:
        raise ValueError(f"run {run!r} cannot go on from step {step}: {error}") from error


def adapter_at(config: RunConfig, step: int) -> AdapterVersion:
    """Return the adapter from which a step starts."""
    origin = replay.origin_of(config.name)
    if origin and step == origin.replayed_from.step:
        return origin.adapter
    if step > 0:
        return lineage.adapter_after(config.name, step - 1)
    return base_version(config)


def base_version(config: RunConfig) -> AdapterVersion:
    """Return version 0: the adapter that the run starts from, or the base model with the properties of the first trained adapter."""
    lora = config.trainer.lora
    base = base_model.reference(config.model)
    files = start_adapter.files_of_version_0(config, base) if lora.start_from is not None else {}
    return AdapterVersion(
        run=config.name,
        version=0,
        base=base,
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        seed=config.seed,
        **files,
    )
