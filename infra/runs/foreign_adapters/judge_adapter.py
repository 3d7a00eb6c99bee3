"""The adapter that judges for a run (reward.judge.adapter), served by the run's own engine under a name of its own.

judge-adapters/<digest>/   the folder's file of weights, byte for byte; our adapter_config.json; in state/ the canary that the trainer computed,
                           and judge.json: where it came from, with digests

It is an adapter version of a run `judge-<digest>` that has no steps. So an engine loads, checks and serves it as it does any other.
"""

import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.config import ALL_LINEAR, ATTENTION, JudgeConfig, LoraConfig, RewardConfig, RunConfig, TrainerConfig
from infra.megatron.protocol.adapter_config import peft_config
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.models import base_model
from infra.models.architecture import read_architecture
from infra.records import AdapterVersion, BaseModelRef
from infra.runs.external_adapter import peft_problem
from infra.runs.foreign_adapters import folders
from infra.store.digests import sha256_of
from infra.store.files import fresh_folder, only_maker, publish_folder, read_json, read_record, record_of, write_json
from infra.store.layout import Workspace

log = logging.getLogger(__name__)

FIELD = "reward.judge.adapter"
NOTE = "state/prepared.json"
VERSION = 1
"""0 would be a base model."""
SHOWN_DIGITS = 12


class JudgeAdapter(BaseModel):
    """The content of state/prepared.json."""

    source: str
    weights_sha256: str
    copied_config_sha256: str
    canary_sha256: str
    """Digests of the three files of the copy."""


def check(config: RunConfig, reward: RewardConfig) -> None:
    """Check the adapter that judges, before anything starts.

    reward: Of the run, or of one of its evaluation sets.

    Raises:
        ValueError: for a folder that is no plain LoRA of the run's base model, or that its engine cannot serve.
    """
    if uses(reward):
        _check(reward.judge, config)


def uses(reward: RewardConfig) -> bool:
    """Whether an adapter judges."""
    return reward.is_judged_by_engine and bool(reward.judge.adapter)


def _check(judge: JudgeConfig, config: RunConfig) -> None:
    folder = _folder(judge)
    about = _about(folder)
    if about["r"] > config.engine.max_lora_rank:
        raise ValueError(
            f"{FIELD} {str(folder)!r} has rank {about['r']}, engine.max_lora_rank is {config.engine.max_lora_rank}: raise it"
        )
    folders.check_base(FIELD, folder, about, config.model)
    model_folder, lora = base_model.locate(config.model), _lora_of(about)
    folders.check_tensors(FIELD, folder / ADAPTER_WEIGHTS, model_folder, lora)
    check_targets(judge, lora.target_modules, config.trainer.lora.target_modules)
    if read_architecture(model_folder).experts and (on_experts := set(lora.target_modules) - set(ATTENTION)):
        raise ValueError(
            f"{FIELD} {str(folder)!r} is on {', '.join(sorted(on_experts))} of a mixture of experts, which is not supported: take one on "
            f"{', '.join(ATTENTION)}"
        )


def check_targets(judge: JudgeConfig, targets: tuple[str, ...], served: tuple[str, ...]) -> None:
    """Check that the engine can serve the adapter beside the run's own: it is launched for the targets of that one.

    Raises:
        ValueError: with what to set.
    """
    if more := [name for name in targets if name not in served]:
        raise ValueError(
            f"{FIELD} {judge.adapter!r} is on {', '.join(more)} too, and the engine is launched for the run's own targets, "
            f"{', '.join(served)}: add them to trainer.lora.target_modules, or take another adapter"
        )


def digest(judge: JudgeConfig) -> str:
    """Digest the adapter's two files: they decide what samples get. Raises ValueError for a folder that is no plain LoRA."""
    folder = _folder(judge)
    _about(folder)
    content = [sha256_of(folder / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)]
    return hashlib.sha256(" ".join(content).encode()).hexdigest()


def prepared(judge: JudgeConfig, base: BaseModelRef) -> AdapterVersion:
    """Return the adapter as an engine serves it. It is copied, and its canary computed on the CPU, unless that was done before.

    Raises:
        ValueError: for a folder that is no plain LoRA, and for a copy that was changed.
    """
    found = digest(judge)
    name = hashlib.sha256(f"{found} {base.sha256}".encode()).hexdigest()[:SHOWN_DIGITS]
    target = Workspace.here().judge_adapters / name
    if not (target / NOTE).exists():
        with only_maker(target):
            if not (target / NOTE).exists():
                _copy(judge, base, target, found)
    files = {"weights": ADAPTER_WEIGHTS, "adapter_config": ADAPTER_CONFIG, "canary": CANARY}
    records = {field: record_of(target / path) for field, path in files.items()}
    note = read_record(target / NOTE, JudgeAdapter, cure="remove its folder, and the adapter is copied again")
    recorded = (note.weights_sha256, note.copied_config_sha256, note.canary_sha256)
    for (field, record), expected in zip(records.items(), recorded, strict=True):
        if record.sha256 != expected:
            raise ValueError(
                f"{FIELD} {judge.adapter!r}: {target / files[field]} was changed: its digest is {record.sha256}, recorded was {expected}. "
                f"Remove {target}, and the adapter is copied again"
            )
    lora = _lora_of(_about(_folder(judge)))
    of_lora = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": lora.target_modules}
    return AdapterVersion(run=f"judge-{name}", version=VERSION, base=base, seed=0, **of_lora, **records)


def _folder(judge: JudgeConfig) -> Path:
    return Path(os.path.expanduser(judge.adapter))


def _about(folder: Path) -> dict[str, Any]:  # Any: JSON
    if problem := peft_problem(folder):
        raise ValueError(f"{FIELD}: {problem}")
    about: dict[str, Any] = read_json(folder / ADAPTER_CONFIG)
    return about


def _lora_of(about: dict[str, Any]) -> LoraConfig:
    targets = tuple(name for name in ALL_LINEAR if name in about["target_modules"])
    return LoraConfig(rank=about["r"], alpha=about["lora_alpha"], target_modules=targets)


def _copy(judge: JudgeConfig, base: BaseModelRef, target: Path, expected: str) -> None:
    """Make the folder, whole or not at all."""
    source, staging = _folder(judge), fresh_folder(target.with_name(f"{target.name}.partial"))
    lora = _lora_of(_about(source))
    shutil.copyfile(source / ADAPTER_WEIGHTS, staging / ADAPTER_WEIGHTS)
    weights = sha256_of(staging / ADAPTER_WEIGHTS)
    if digest(judge) != expected or weights != sha256_of(source / ADAPTER_WEIGHTS):
        raise ValueError(f"{FIELD}: {source} changed while it was copied: try again when it is whole")
    write_json(staging / ADAPTER_CONFIG, peft_config(base_model.lasting_name(base), lora))
    folders.write_moments(staging)
    what = "the adapter that judges"
    folders.write_canary(staging, staging / CANARY, base, weights, TrainerConfig(lora=lora), 0, what)
    for name in MOMENTS.values():
        (staging / name).unlink()
    digests = [sha256_of(staging / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, CANARY)]
    note = JudgeAdapter(source=str(source), weights_sha256=digests[0], copied_config_sha256=digests[1], canary_sha256=digests[2])
    write_json(staging / NOTE, note.model_dump())
    publish_folder(staging, target)
    log.info("the adapter %s (SHA-256 %s) judges as %s", source, weights, f"judge-{target.name}")
