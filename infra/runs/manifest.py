"""manifest.json of a step: digests of all that went in and came out, and what it ran with. A step that has one is done.

The manifests of two identical runs on one machine differ in `committed_at` and in the runs' names, in nothing else: durations are in
report.json and train/result.json.
"""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from pydantic import ValidationError

from infra.config import RunConfig
from infra.config.tools.overrides import one_line
from infra.machine import devices
from infra.records import (
    AdapterVersion,
    EngineRan,
    File,
    ProgramRan,
    PromptBatch,
    Record,
    Rollouts,
    ScoredRollouts,
    TrainBatch,
    TrainerRan,
)
from infra.settings import CHECKOUT, settings
from infra.store import code_digest
from infra.store.digests import sha256_of
from infra.store.files import read_json
from infra.store.layout import StepFolder

PACKAGES = ("prefect", "mlflow", "torch", "megatron-core", "transformers", "datasets", "numpy", "pyarrow", "safetensors")
GIT_TIMEOUT_S = 20


class Environment(Record):
    """The code and the machine."""

    commit: str = ""
    """Of git, with `-dirty` where files that it knows were changed; empty where the checkout is none."""
    code: str
    """Over all sources of ours; comments and layout do not count."""
    sources: dict[str, str]
    """The digest of each of them, by its path in the checkout."""
    locks: dict[str, str]
    """SHA-256 of each file of infra/setup/locks: what should run. What did run, the versions say."""
    versions: dict[str, str]
    """Of Python and of packages in this environment; those of engine and trainer are in what a manifest says of them."""
    machine: dict[str, str]
    """What it computes on: numbers may differ in the last bit on another."""


class ReplayedFrom(Record):
    """The step that this one is a replay of."""

    run: str
    step: int
    manifest_sha256: str
    from_task: str
    """The first task that was run again; what lies before it was taken over."""
    overrides: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    """In code, locks, versions and machine, at the time of the replay."""


class Manifest(Environment):
    run: str
    step: int
    config: RunConfig
    adapter_in: AdapterVersion
    prompts: PromptBatch
    rollouts: Rollouts
    scored: ScoredRollouts
    batch: TrainBatch
    adapter_out: AdapterVersion
    colocation: dict[str, str]
    engine: EngineRan
    trainer: TrainerRan
    reward_source: str
    """Digest of the file of a user's own reward; empty for a built-in one, which `code` covers."""
    replayed_from: ReplayedFrom | None = None
    committed_at: float
    """Seconds since the epoch."""


def read_manifest(folder: Path) -> Manifest:
    """Of a committed step.

    Raises:
        ValueError: if it cannot be read, or was written by a version of Ratchet that wrote less; names the file.
    """
    path = StepFolder(folder).manifest
    try:
        return Manifest.model_validate(read_json(path))
    except ValidationError as error:
        raise ValueError(f"{path} is not a manifest that this version of Ratchet can read: {one_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def environment() -> Environment:
    return Environment(
        commit=_commit(),
        code=code_digest.digest("flows", "tasks", "infra"),
        sources=code_digest.by_file("flows", "tasks", "infra"),
        locks={path.name: sha256_of(path) for path in sorted((CHECKOUT / "infra/setup/locks").glob("*.txt"))},
        versions={"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES},
        machine=_machine(),
    )


def _commit() -> str:
    if not (CHECKOUT / ".git").exists():  # else git would answer for a checkout that this folder happens to lie in
        return ""
    asked = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(asked, cwd=CHECKOUT, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _machine() -> dict[str, str]:
    threads = settings().num_cpu_threads or os.cpu_count() or 1
    driver = {name: version for name, version in devices.gpu_versions().items() if name == "driver"}
    return {"device": devices.device(), "processor": devices.processor(), "num_cpu_threads": str(threads)} | driver


def differences(before: Environment, now: Environment) -> tuple[str, ...]:
    """One line for each kind of thing that differs, naming what does."""
    found = []
    for kind in ("sources", "locks"):
        changed = sorted(name for name, _, _ in _changed(getattr(before, kind), getattr(now, kind)))
        found += [f"{kind}: {', '.join(changed)}"] if changed else []
    for kind in ("versions", "machine"):
        found += changes(kind, getattr(before, kind), getattr(now, kind))
    return tuple(found)


def changes(title: str, before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return one line that names what differs, or nothing."""
    changed = [f"{name} {was} -> {new}" for name, was, new in _changed(before, now)]
    return [f"{title}: {', '.join(changed)}"] if changed else []


def program_changes(before: Manifest, engine: EngineRan, trainer: TrainerRan) -> tuple[str, ...]:
    """Return a line for each program that did not run with what it ran with in the step before. Another kind of engine is a change of the
    configuration, and its versions have nothing to be compared with."""
    pairs: list[tuple[str, ProgramRan, ProgramRan]] = [("trainer", before.trainer, trainer)]
    if engine.kind == before.engine.kind:
        pairs.insert(0, (f"engine {engine.kind}", before.engine, engine))
    return tuple(
        line for name, was, ran in pairs for line in changes(name, was.versions | was.backends, ran.versions | ran.backends)
    )


def _changed(before: dict[str, str], now: dict[str, str]) -> list[tuple[str, str | None, str | None]]:
    return [(name, before.get(name), now.get(name)) for name in sorted(before | now) if before.get(name) != now.get(name)]


def products(record: Manifest) -> dict[str, str]:
    """The digest of each file that the step took or made, in the order of the step."""
    return digests_of(record.adapter_in, record.prompts, record.rollouts, record.scored, record.batch, record.adapter_out)


def digests_of(
    start: AdapterVersion,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    trained: AdapterVersion,
) -> dict[str, str]:
    files: dict[str, File | None] = {
        "adapter in": start.weights,
        "adapter config in": start.adapter_config,
        **{f"{name} in": moment for name, moment in start.moments.items()},
        "prompts": prompts.file,
        "begun": prompts.begun,
        "samples": rollouts.file,
        "left over": rollouts.left_over.samples if rollouts.left_over else None,
        "scored": scored.file,
        "batch": batch.file,
        "assembled": batch.samples,
        "adapter out": trained.weights,
        "adapter config out": trained.adapter_config,
        **{f"{name} out": moment for name, moment in trained.moments.items()},
        "canary": trained.canary,
    }
    return {name: file.sha256 for name, file in files.items() if file}
