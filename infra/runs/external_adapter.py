"""Adapters that no run of this workspace made, and those that retention took away."""

import hashlib
import json
import shutil
from pathlib import Path

from infra.config import ALL_LINEAR, RunConfig
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from infra.models import base_model
from infra.records import AdapterVersion
from infra.store.digests import sha256_of
from infra.store.files import fresh_folder, new_id, publish_folder, read_json, record_of, write_json
from infra.store.layout import RunFolder, adapter_folder, run_folder

PLAIN = {"bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "modules_to_save": None}
"""What a PEFT adapter must say, or leave unsaid, to be a plain LoRA."""
NEEDED = f"give the folder of a LoRA adapter as PEFT saves it, with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
UNUSABLE = (
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
    "use_qalora",
    "trainable_token_indices",
    "target_parameters",
)
"""Fields that must be missing or off: each changes what the adapter does, or on what."""
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights under which PEFT takes the first adapter out of the base model's weights: on the plain base it is another model."""


def peft_problem(folder: Path) -> str | None:
    """Why a folder is no plain LoRA adapter that can be served and merged here; None if it is one."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            return f"{folder} {f'has no {name}' if folder.is_dir() else 'is no folder on this machine'}: {NEEDED}"
    about = read_json(folder / ADAPTER_CONFIG)
    if not isinstance(about, dict):
        return f"{folder / ADAPTER_CONFIG} holds no JSON object: {NEEDED}"
    if about.get("peft_type") != "LORA":
        return f"{folder} holds {about.get('peft_type')!r}, only 'LORA' can be used"
    for field, plain in PLAIN.items():
        if about.get(field, plain) not in (plain, [] if plain is None else plain):
            return f"{folder}: {field} {about[field]!r} cannot be used, only {plain!r}"
    for field in UNUSABLE:
        if about.get(field):
            return f"{folder}: {field} {about[field]!r} cannot be used"
    if str(how := about.get("init_lora_weights")).lower().startswith(CHANGE_THE_BASE):
        return f"{folder}: init_lora_weights {how!r} changes the base model's weights; convert it to a plain LoRA (PEFT's save_pretrained can)"
    for field in ("rank_pattern", "alpha_pattern"):
        if about.get(field):
            return f"{folder}: {field} {about[field]!r} cannot be used, all targets must be alike"
    for field in ("r", "lora_alpha"):
        if not isinstance(value := about.get(field), int | float) or value <= 0:
            return f"{folder}: {field} {value!r} must be a number above 0"
    targets = about.get("target_modules")
    if not isinstance(targets, list) or not targets or set(targets) - set(ALL_LINEAR):
        return f"{folder}: target_modules {targets!r} must be a list of {', '.join(ALL_LINEAR)}"
    return None


def check(config: RunConfig, folder: Path) -> None:
    """Check a folder that `adopt` is to take, without reading its weights.

    Raises:
        ValueError: if it is neither a PEFT folder that can be served, nor a base model's folder.
    """
    if not (folder / ADAPTER_CONFIG).exists():
        base_model.check_supported(folder)
        return
    if problem := peft_problem(folder):
        raise ValueError(f"adapter {problem}")
    if (rank := read_json(folder / ADAPTER_CONFIG)["r"]) > config.engine.max_lora_rank:
        raise ValueError(f"adapter {folder} has rank {rank}, engine.max_lora_rank is {config.engine.max_lora_rank}: raise it")


def adopt(config: RunConfig, folder: Path) -> AdapterVersion:
    """A record for a PEFT folder, or for a base model's folder; a PEFT folder is copied into the workspace.

    It belongs to a run of its own, `external-<digest>`: its evaluations are not those of the run that they are compared with.

    Raises:
        ValueError: if the folder is neither.
    """
    check(config, folder)
    if (folder / ADAPTER_CONFIG).exists():
        return _adopted_adapter(config, folder)
    reference = base_model.reference(str(folder))
    lora = config.trainer.lora
    adopted = AdapterVersion(
        run=f"external-{reference.sha256[:12]}",
        version=0,
        base=reference,
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=lora.target_modules,
        seed=0,
    )
    return _with_config(config.but(model=str(folder)), adopted)


def _adopted_adapter(config: RunConfig, folder: Path) -> AdapterVersion:
    about = read_json(folder / ADAPTER_CONFIG)
    base = base_model.reference(config.model)
    content = [sha256_of(folder / ADAPTER_WEIGHTS), base.sha256, about["r"], about["lora_alpha"], sorted(about["target_modules"])]
    run = f"external-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]}"
    target = adapter_folder(run, 1)
    if not (target / ADAPTER_WEIGHTS).exists():
        staging = fresh_folder(target.with_name("adopted.partial"))
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copyfile(folder / name, staging / name)
        publish_folder(staging, target)
    adopted = AdapterVersion(
        run=run,
        version=1,
        base=base,
        rank=about["r"],
        alpha=about["lora_alpha"],
        target_modules=tuple(name for name in ALL_LINEAR if name in about["target_modules"]),
        seed=0,
        weights=record_of(target / ADAPTER_WEIGHTS),
        adapter_config=record_of(target / ADAPTER_CONFIG),
    )
    return _with_config(config, adopted)


def _with_config(config: RunConfig, adopted: AdapterVersion) -> AdapterVersion:
    """Its folder says what it was looked at with, as that of every run does."""
    path = RunFolder.of(adopted.run).config
    if not path.exists():
        new_id(run_folder(adopted.run))
        write_json(path, config.but(name=adopted.run).model_dump(mode="json"))
    return adopted
