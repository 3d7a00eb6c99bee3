"""manifest.json of a step: digests of all inputs and outputs, and the programs it ran with. A step with a manifest is committed.

The manifests of two identical runs on one machine differ only in `committed_at` and in the runs' names. Durations are in report.json and
train/result.json.
"""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
    """Git commit, with `-dirty` if tracked files were changed; empty without a git checkout."""
    code: str
    """Digest of all our sources; comments and layout do not count."""
    sources: dict[str, str]
    """The digest of each source file, by its path in the checkout."""
    locks: dict[str, str]
    """SHA-256 of each file of infra/setup/locks, which define the expected versions. `versions` has the actual ones."""
    versions: dict[str, str]
    """Versions of Python and of packages in this environment. Those of engine and trainer are in their own fields of the manifest."""
    machine: dict[str, str]
    """The hardware. Numbers may differ in the last bit on another machine."""


class ReplayedFrom(Record):
    """The step of which this one is a replay."""

    run: str
    step: int
    manifest_sha256: str
    from_task: str
    """The first task that was run again. Earlier results were reused."""
    overrides: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    """Differences in code, locks, versions and machine, at the time of the replay."""


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
    """Digest of a user's own reward, or of a built-in one that a worker calls. Empty for the others, which `code` covers."""
    replayed_from: ReplayedFrom | None = None
    committed_at: float
    """Seconds since the epoch."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a committed step.

    Raises:
        ValueError: if it cannot be read, or was written by a version of Ratchet with fewer fields; names the file.
    """
    path = StepFolder(folder).manifest
    try:
        return Manifest.model_validate(read_json(path))
    except ValidationError as error:
        raise ValueError(f"{path} is not a manifest that this version of Ratchet can read: {one_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"{error}; put the right file back, or drop the step with `ratchet drop`") from error


def environment() -> Environment:
    """Return what the step was made with, as it is now: commit, sources, locks, versions, machine."""
    return Environment(
        commit=_commit(),
        code=code_digest.digest("flows", "tasks", "infra"),
        sources=code_digest.by_file("flows", "tasks", "infra"),
        locks={path.name: sha256_of(path) for path in sorted((CHECKOUT / "infra/setup/locks").glob("*.txt"))},
        versions={"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES},
        machine=_machine(),
    )


def _commit() -> str:
    if not (CHECKOUT / ".git").exists():  # otherwise git would report a checkout that happens to contain this folder
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
    """Return one line for each kind of difference, which names the differences."""
    found = []
    for kind in ("sources", "locks"):
        changed = sorted(name for name, _, _ in _changed(getattr(before, kind), getattr(now, kind)))
        found += [f"{kind}: {', '.join(changed)}"] if changed else []
    for kind in ("versions", "machine"):
        found += changes(kind, getattr(before, kind), getattr(now, kind))
    return tuple(found)


def changes(title: str, before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return one line that names the differences, or nothing."""
    changed = [f"{name} {was} -> {new}" for name, was, new in _changed(before, now)]
    return [f"{title}: {', '.join(changed)}"] if changed else []


class Ran(NamedTuple):
    """What made a step's samples, adapter and scores, beside its configuration."""

    engine: EngineRan
    trainer: TrainerRan
    reward_source: str
    """Digest; see Manifest."""


def program_changes(before: Ran, now: Ran) -> tuple[str, ...]:
    """Return a line for each program that ran with other versions than in the previous step, and for another source of the reward. Another kind
    of engine is a change of the configuration, and its versions cannot be compared."""
    pairs: list[tuple[str, ProgramRan, ProgramRan]] = [("trainer", before.trainer, now.trainer)]
    if now.engine.kind == before.engine.kind:
        pairs.insert(0, (f"engine {now.engine.kind}", before.engine, now.engine))
    of_programs = [
        line for name, was, ran in pairs for line in changes(name, was.versions | was.backends, ran.versions | ran.backends)
    ]
    is_same = before.reward_source == now.reward_source
    return (*of_programs, *([] if is_same else ["the source of the reward: these scores are of another state of it"]))


def changes_at(run: str, steps: Iterable[int]) -> list[tuple[int, str]]:
    """Return what ran otherwise in a step than in the one before it, as the step and a line, for each of these committed steps. A step whose
    manifest does not say it, such as one of an earlier version of Ratchet, is passed over."""
    known: dict[int, Ran | None] = {}

    def at(step: int) -> Ran | None:
        if step not in known:
            known[step] = None
            with suppress(ValueError, OSError, KeyError, TypeError):
                told = read_json(StepFolder.at(run, step).manifest)
                programs = EngineRan.model_validate(told["engine"]), TrainerRan.model_validate(told["trainer"])
                known[step] = Ran(*programs, told["reward_source"])
        return known[step]

    pairs = ((step, at(step - 1), at(step)) for step in steps)
    return [(step, line) for step, before, now in pairs if before and now for line in program_changes(before, now)]


def _changed(before: dict[str, str], now: dict[str, str]) -> list[tuple[str, str | None, str | None]]:
    return [(name, before.get(name), now.get(name)) for name in sorted(before | now) if before.get(name) != now.get(name)]


def products(record: Manifest) -> dict[str, str]:
    """Return the digest of each input and output file of the step, in the order of the step."""
    return digests_of(record.adapter_in, record.prompts, record.rollouts, record.scored, record.batch, record.adapter_out)


def digests_of(
    start: AdapterVersion,
    prompts: PromptBatch,
    rollouts: Rollouts,
    scored: ScoredRollouts,
    batch: TrainBatch,
    trained: AdapterVersion,
) -> dict[str, str]:
    """SHA-256 of each file of a step, in the order of the step, by a name for people; files that the step does not have are left out."""
    files: dict[str, File | None] = {
        "adapter in": start.weights,
        "adapter config in": start.adapter_config,
        **{f"{name} in": moment for name, moment in start.moments.items()},
        "pass rates": prompts.pass_rates,
        "prompts": prompts.file,
        "begun": prompts.begun,
        "draws": prompts.draws,
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
