"""Start a run from an adapter that other software made (trainer.lora.start_from): it becomes the run's adapter version 0.

runs/<run>/adapters/000000/   the adapter's own file of weights, byte for byte; our adapter_config.json; in state/ an optimizer state of zeros,
                              the canary that the trainer computed, and start.json: where it came from, with digests
"""

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.numpy
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from infra.config import ALL_LINEAR, LoraConfig, RunConfig
from infra.megatron.protocol.adapter_config import peft_config
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY, TrainJob
from infra.megatron.protocol.optimizer_files import MOMENTS, NUM_STEPS
from infra.models import base_model
from infra.models.architecture import linear_shapes, read_architecture
from infra.processes import child_environment, children
from infra.progress import work as progress
from infra.records import BaseModelRef, File
from infra.runs import replay
from infra.runs.external_adapter import peft_problem
from infra.settings import settings
from infra.store.digests import sha256_of
from infra.store.files import fresh_folder, only_maker, publish_folder, read_json, read_record, record_of, write, write_json
from infra.store.layout import StepFolder, TrainFolder, Workspace, adapter_folder

log = logging.getLogger(__name__)

FIELD = "trainer.lora.start_from"
START = "state/start.json"
PEFT_PREFIX = "base_model.model."
CANARY_TIMEOUT_S = 1800.0
CANARY_TEXT = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell "
    "altogether in April and May? The quick brown fox jumps over the lazy dog. 17 + 25 = 42"
)


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
    folder = Path(source).expanduser()
    if (started := _start_of(config.name)) is not None:
        _check_unchanged(config.name, folder, started)
        return
    if problem := peft_problem(folder):
        raise ValueError(f"{FIELD}: {problem}")
    about = read_json(folder / ADAPTER_CONFIG)
    _check_fields(folder, about, config.trainer.lora)
    _check_base(folder, about, config.model)
    _check_tensors(folder / ADAPTER_WEIGHTS, base_model.locate(config.model), config.trainer.lora)
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


def _check_base(folder: Path, about: dict[str, Any], model: str) -> None:
    """The adapter says of its base model what its trainer loaded: a hub id, a folder, or a digest, where Ratchet made it."""
    named, base = str(about.get("base_model_name_or_path") or ""), base_model.reference(model)
    if Path(named).expanduser().is_dir() and named:
        is_other = base_model.digest(Path(named).expanduser()) != base.sha256
    else:
        is_hub_id = named.count("/") == 1 and not named.startswith((".", "/", "~"))
        is_other = named not in (base_model.lasting_name(base), model) and (
            named.startswith("sha256:") or (is_hub_id and base_model.lasting_name(base) == model)
        )
    if is_other:
        raise ValueError(
            f"{FIELD} {str(folder)!r} was trained on base model {named!r}, the run's is {model!r}: take that model (where both are the same, "
            f"set base_model_name_or_path in its {ADAPTER_CONFIG})"
        )


def _check_tensors(path: Path, model_folder: Path, lora: LoraConfig) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for name, (out, into) in linear_shapes(read_architecture(model_folder)).items():
        if name.rsplit(".", 1)[1] in lora.target_modules:
            expected[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (lora.rank, into)
            expected[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (out, lora.rank)
    try:
        with safe_open(path, "numpy") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{FIELD}: {path} is no whole safetensors file: {error}") from error
    if different := sorted(set(expected) ^ set(found)):
        missing = different[0] in expected
        raise ValueError(
            f"{FIELD}: {path} has {'no tensor' if missing else 'an unexpected tensor'} {different[0]} ({len(different)} such): "
            "it was made for another model or other targets"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{FIELD}: {path}: {name} has shape {found[name]}, for this model and rank it should be {shape}")


def _adopt(config: RunConfig, base: BaseModelRef, target: Path) -> None:
    """Make the folder of version 0, whole or not at all. Its canary is the trainer's own, computed on the CPU."""
    source = Path(str(config.trainer.lora.start_from)).expanduser()
    staging = fresh_folder(target.with_name("start.partial"))
    start = Start(source=str(source), **_digests(source))
    shutil.copyfile(source / ADAPTER_WEIGHTS, staging / ADAPTER_WEIGHTS)
    if (copied := sha256_of(staging / ADAPTER_WEIGHTS)) != start.weights_sha256:
        raise ValueError(f"{FIELD}: {source / ADAPTER_WEIGHTS} changed while it was copied: try again when it is whole")
    write_json(staging / ADAPTER_CONFIG, peft_config(base_model.lasting_name(base), config.trainer.lora))
    _write_moments(staging)
    _write_canary(config, base, staging, copied)
    write_json(staging / START, start.model_dump())
    publish_folder(staging, target)
    log.info("run %s starts from the adapter %s (SHA-256 %s)", config.name, source, start.weights_sha256)


def _write_moments(folder: Path) -> None:
    """Adam's state before its first step."""
    with safe_open(folder / ADAPTER_WEIGHTS, "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no dict
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in MOMENTS.values():
        write(folder / name, safetensors.numpy.save(zeros, {NUM_STEPS: "0"}))


def _write_canary(config: RunConfig, base: BaseModelRef, folder: Path, sha256: str) -> None:
    model_folder = base_model.locate(base.id)
    tokens = np.asarray(base_model.tokenizer(model_folder).encode(CANARY_TEXT), np.int64)
    nothing = np.zeros(len(tokens), np.float32)
    batch = {"tokens": tokens, "cu_seqlens": np.array([0, len(tokens)], np.int64), "rollout_logprobs": nothing}
    batch |= {"loss_mask": (np.arange(len(tokens)) > 0).astype(np.uint8), "advantages": nothing}
    with TemporaryDirectory(prefix="ratchet-canary-") as scratch:
        place = TrainFolder(Path(scratch))
        job = TrainJob(
            model_path=model_folder,
            base_model_id=base_model.lasting_name(base),
            adapter_path=folder,
            adapter_version=0,
            adapter_sha256=sha256,
            num_optimizer_steps=0,
            batch_path=StepFolder(place.path).batch,
            output_dir=place.path,
            result_path=place.result,
            seed=config.seed,
            num_threads=settings().num_cpu_threads or os.cpu_count() or 1,
            device="cpu",
            trainer=config.trainer,
        )
        about = {"adapter_version": "0", "adapter_sha256": sha256, "temperature": "1.0"}
        write(job.batch_path, safetensors.numpy.save(batch, about))
        write_json(place.job, job.model_dump(mode="json"))
        _run_canary(place.job, folder / CANARY)


def _run_canary(job: Path, out: Path) -> None:
    with progress.work("computing the canary of the adapter to start from"):
        children.run(
            [sys.executable, "-m", "infra.megatron.program.adapter_canary", str(job), str(out)],
            Workspace.here().logs / "start-adapter.log",
            timeout_s=CANARY_TIMEOUT_S,
            env={"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"},
            inherits=child_environment.passed_on(),
        )
