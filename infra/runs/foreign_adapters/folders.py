"""Adapters in Hugging Face PEFT folders that other software made: whether they are of a base model, and the canary that Ratchet gives them."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from infra.config import LoraConfig, TrainerConfig
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TrainJob
from infra.megatron.protocol.optimizer_files import MOMENTS, NUM_STEPS
from infra.models import base_model
from infra.models.architecture import linear_shapes, read_architecture
from infra.processes import child_environment, children
from infra.progress import work as progress
from infra.records import BaseModelRef
from infra.settings import settings
from infra.store.files import write, write_json
from infra.store.layout import StepFolder, TrainFolder, Workspace

PEFT_PREFIX = "base_model.model."
CANARY_LOG = "start-adapter.log"
"""In the workspace's folder of logs."""
CANARY_TIMEOUT_S = 1800.0
CANARY_TEXT = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell "
    "altogether in April and May? The quick brown fox jumps over the lazy dog. 17 + 25 = 42"
)


def check_base(field: str, folder: Path, about: dict[str, Any], model: str) -> None:
    """The adapter says of its base model what its trainer loaded: a hub id, a folder, or a digest, where Ratchet made it.

    field: Of the configuration that names the folder.
    about: The content of its adapter_config.json.

    Raises:
        ValueError: for another base model than the run's.
    """
    named, base = str(about.get("base_model_name_or_path") or ""), base_model.reference(model)
    if Path(os.path.expanduser(named)).is_dir() and named:
        is_other = base_model.digest(Path(os.path.expanduser(named))) != base.sha256
    else:
        is_hub_id = named.count("/") == 1 and not named.startswith((".", "/", "~"))
        is_other = named not in (base_model.lasting_name(base), model) and (
            named.startswith("sha256:") or (is_hub_id and base_model.lasting_name(base) == model)
        )
    if is_other:
        raise ValueError(
            f"{field} {str(folder)!r} was trained on base model {named!r}, the run's is {model!r}: take that model (where both are the same, "
            f"set base_model_name_or_path in its {ADAPTER_CONFIG})"
        )


def check_tensors(field: str, path: Path, model_folder: Path, lora: LoraConfig) -> None:
    """Raises ValueError unless a file of weights has the tensors of this model, rank and targets, in their shapes."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, (out, into) in linear_shapes(read_architecture(model_folder)).items():
        if name.rsplit(".", 1)[1] in lora.target_modules:
            expected[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (lora.rank, into)
            expected[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (out, lora.rank)
    try:
        with safe_open(path, "numpy") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{field}: {path} is no whole safetensors file: {error}") from error
    if different := sorted(set(expected) ^ set(found)):
        missing = different[0] in expected
        raise ValueError(
            f"{field}: {path} has {'no tensor' if missing else 'an unexpected tensor'} {different[0]} ({len(different)} such): "
            "it was made for another model or other targets"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{field}: {path}: {name} has shape {found[name]}, for this model and rank it should be {shape}")


def write_moments(folder: Path) -> None:
    """Write Adam's state before its first step: the trainer takes no adapter without."""
    with safe_open(folder / ADAPTER_WEIGHTS, "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no dict
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in MOMENTS.values():
        write(folder / name, safetensors.numpy.save(zeros, {NUM_STEPS: "0"}))


def write_canary(folder: Path, out: Path, base: BaseModelRef, sha256: str, trainer: TrainerConfig, seed: int, what: str) -> None:
    """Write the trainer's own log-probabilities of an adapter, computed on the CPU: an engine that serves it must give the same.

    folder: Of the adapter, as PEFT lays it out, with the files of write_moments.
    sha256: Of the adapter's weights.
    what: Whose canary it is, for people.
    """
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
            seed=seed,
            num_threads=settings().num_cpu_threads or os.cpu_count() or 1,
            device="cpu",
            trainer=trainer,
        )
        about = {"adapter_version": "0", "adapter_sha256": sha256, "temperature": "1.0"}
        write(job.batch_path, safetensors.numpy.save(batch, about))
        write_json(place.job, job.model_dump(mode="json"))
        _run_canary(place.job, out, what)


def _run_canary(job: Path, out: Path, what: str) -> None:
    with progress.work(f"computing the canary of {what}"):
        children.run(
            [sys.executable, "-m", "infra.megatron.program.adapter_canary", str(job), str(out)],
            Workspace.here().logs / CANARY_LOG,
            timeout_s=CANARY_TIMEOUT_S,
            env={"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"},
            inherits=child_environment.passed_on(),
        )
