"""Start a run from an adapter that other software made (trainer.lora.start_from): it becomes the run's adapter version 0.

runs/<run>/adapters/000000/   the adapter's own file of weights, byte for byte; our adapter_config.json; in state/ an optimizer state of zeros,
                              the canary that the trainer computed, and start.json: where it came from, with digests
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.config import ALL_LINEAR, LoraConfig, RunConfig
from infra.megatron.protocol.adapter_config import peft_config
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.models import base_model
from infra.records import BaseModelRef, File
from infra.runs import replay
from infra.runs.external_adapter import peft_problem
from infra.runs.foreign_adapters import folders
from infra.store.digests import sha256_of
from infra.store.files import fresh_folder, only_maker, publish_folder, read_json, read_record, record_of, write_json
from infra.store.layout import adapter_folder

log = logging.getLogger(__name__)

FIELD = "trainer.lora.start_from"
START = "state/start.json"


class Start(BaseModel):
    """The content of state/start.json."""

    source: str
    weights_sha256: str
    config_sha256: str
    """Digests of the two files of the folder that the run started from."""


def check(config: RunConfig) -> None:
    """Check the adapter that a run starts from, before anything starts. A run that has its copy needs the folder no longer.

    Raises:
        ValueError: for a folder that is no plain LoRA of this base model, rank, alpha and targets, or that has changed since.
    """
    source = config.trainer.lora.start_from
    if source is None or replay.origin_of(config.name):  # a replay's adapter was copied from the run that it replays
        return
    folder = Path(os.path.expanduser(source))
    if (started := _start_of(config.name)) is not None:
        _check_unchanged(config.name, folder, started)
        return
    if problem := peft_problem(folder):
        raise ValueError(f"{FIELD}: {problem}")
    about = read_json(folder / ADAPTER_CONFIG)
    _check_fields(folder, about, config.trainer.lora)
    folders.check_base(FIELD, folder, about, config.model)
    folders.check_tensors(FIELD, folder / ADAPTER_WEIGHTS, base_model.locate(config.model), config.trainer.lora)
    if config.trainer.loss.kl.coefficient:
        log.warning(
            "trainer.loss.kl.coefficient %g with %s: the penalty is for leaving the base model, which has none of that adapter",
            *(config.trainer.loss.kl.coefficient, FIELD),
        )


def files_of_version_0(config: RunConfig, base: BaseModelRef) -> dict[str, File]:
    """Return the files of the adapter that a run starts from; copy it into the run, with its canary, if that was not done yet."""
    target = adapter_folder(config.name, 0)
    if _start_of(config.name) is None:
        check(config)
        with only_maker(target):
            if _start_of(config.name) is None:
                _adopt(config, base, target)
    files = {"weights": ADAPTER_WEIGHTS, "adapter_config": ADAPTER_CONFIG, **MOMENTS, "canary": CANARY}
    return {name: record_of(target / path) for name, path in files.items()}


def _start_of(run: str) -> Start | None:
    path = adapter_folder(run, 0) / START
    return read_record(path, Start, cure="remove its adapter's folder, and the adapter is taken again") if path.exists() else None


def _digests(folder: Path) -> dict[str, str]:
    return {"weights_sha256": sha256_of(folder / ADAPTER_WEIGHTS), "config_sha256": sha256_of(folder / ADAPTER_CONFIG)}


def _check_unchanged(run: str, folder: Path, started: Start) -> None:
    if not all((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        return
    if (found := _digests(folder)) != started.model_dump(exclude={"source"}):
        raise ValueError(
            f"{FIELD} {str(folder)!r} has changed since run {run!r} started from it: the digest of its weights is "
            f"{found['weights_sha256']}, recorded was {started.weights_sha256}. Put it back, or begin another run"
        )


def _check_fields(folder: Path, about: dict[str, Any], lora: LoraConfig) -> None:
    targets = tuple(name for name in ALL_LINEAR if name in about["target_modules"])
    if (about["r"], about["lora_alpha"], targets) != (lora.rank, lora.alpha, lora.target_modules):
        raise ValueError(
            f"{FIELD} {str(folder)!r} has rank {about['r']}, alpha {about['lora_alpha']:g} and targets {', '.join(targets)}; the run has rank "
            f"{lora.rank}, alpha {lora.alpha:g} and targets {', '.join(lora.target_modules)}: set --trainer.lora.rank {about['r']} "
            f"--trainer.lora.alpha {about['lora_alpha']:g} --trainer.lora.target_modules '{json.dumps(targets)}'"
        )


def _adopt(config: RunConfig, base: BaseModelRef, target: Path) -> None:
    """Make the folder of version 0, whole or not at all. Its canary is the trainer's own, computed on the CPU."""
    source = Path(os.path.expanduser(str(config.trainer.lora.start_from)))
    staging = fresh_folder(target.with_name("start.partial"))
    start = Start(source=str(source), **_digests(source))
    shutil.copyfile(source / ADAPTER_WEIGHTS, staging / ADAPTER_WEIGHTS)
    if (copied := sha256_of(staging / ADAPTER_WEIGHTS)) != start.weights_sha256:
        raise ValueError(f"{FIELD}: {source / ADAPTER_WEIGHTS} changed while it was copied: try again when it is whole")
    write_json(staging / ADAPTER_CONFIG, peft_config(base_model.lasting_name(base), config.trainer.lora))
    folders.write_moments(staging)
    what = "the adapter to start from"
    folders.write_canary(staging, staging / CANARY, base, copied, config.trainer, config.seed, what)
    write_json(staging / START, start.model_dump())
    publish_folder(staging, target)
    log.info("run %s starts from the adapter %s (SHA-256 %s)", config.name, source, start.weights_sha256)
