"""The train task's own logic, and the border to a trainer program that runs out of memory."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from infra.config import TrainerConfig
from infra.failures import TrainingFailed
from infra.machine import devices
from infra.megatron.protocol.job import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CANARY
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.records import AdapterVersion, BaseModelRef, TrainBatch
from infra.store.digests import sha256_of
from infra.store.files import DigestMismatch, record_of, write, write_json
from infra.store.layout import Workspace, adapter_folder
from infra.trainers import torchrun
from infra.trainers.interface import TrainerOutOfMemory
from infra.trainers.jobs import job_of
from tasks.train import (
    INPUTS_KEY,
    MISMATCH,
    committed,
    inputs_key,
    made_from,
    next_version,
    refuse_foreign_samples,
    smaller_microbatch,
    train_in_smaller_and_smaller_microbatches,
)

HUNGRY_PROGRAM = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[2]).read_bytes())
tokens = job["trainer"]["max_tokens_per_microbatch"]
print("micro-batches of", tokens, "tokens")
if tokens > int(sys.argv[1]):
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
result = {"adapter_version": 1, "num_optimizer_steps": 1, "metrics": {}, "seconds": {}, "peak_memory_gib": 1.0, "versions": {}}
result |= {"microbatch_rows": min(tokens, 1600), "microbatch_logits": 900}
pathlib.Path(job["result_path"]).write_text(json.dumps(result))
"""


@pytest.fixture
def batch(workspace: Path) -> TrainBatch:
    """Three sequences with nothing in common, the longest of 700 tokens."""
    tensors = {"cu_seqlens": np.array([0, 300, 1000, 1600]), "tokens": np.arange(1600), "groups": np.zeros(3, np.int64)}
    path = write(workspace / "batch.safetensors", safetensors.numpy.save(tensors))
    return TrainBatch(
        run="run",
        step=0,
        adapter_version=0,
        adapter_sha256="base",
        file=record_of(path),
        num_sequences=3,
        num_tokens=1600,
        num_loss_tokens=900,
    )


def train_with_room_for(tokens: int, batch: TrainBatch, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of the micro-batches in the end."""
    program = [sys.executable, "-c", HUNGRY_PROGRAM, str(tokens)]
    monkeypatch.setattr(torchrun, "command", lambda job, *arguments, meeting: [*program, *arguments])
    base = BaseModelRef(id=str(model), sha256="0")
    adapter = AdapterVersion(run="run", version=0, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0)
    train_in_smaller_and_smaller_microbatches(TrainerConfig(max_tokens_per_microbatch=4096), batch, adapter, folder)
    used: int = json.loads((folder / "job.json").read_bytes())["trainer"]["max_tokens_per_microbatch"]
    return used


@pytest.mark.parametrize(("room", "used"), [(5000, 4096), (900, 800), (750, 700)])
def test_out_of_memory_is_answered_with_smaller_microbatches(
    room: int, used: int, batch: TrainBatch, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_with_room_for(room, batch, tmp_path / "train", model_folder, monkeypatch) == used


def test_the_size_that_is_halved_counts_what_sequences_have_in_common_once(
    batch: TrainBatch, workspace: Path, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 answers of 50 tokens to one prompt of 250: 1,000 rows, and half of them fit at once. 4,500 would be halved three times, to 512."""
    prompt, answers = np.arange(250), np.arange(250, 1000).reshape(15, 50)
    tokens = np.concatenate([part for answer in answers for part in (prompt, answer)])
    tensors = {"cu_seqlens": np.arange(0, 4501, 300), "tokens": tokens, "groups": np.zeros(15, np.int64)}
    file = record_of(write(workspace / "shared.safetensors", safetensors.numpy.save(tensors)))
    shared = batch.model_copy(update={"file": file, "num_sequences": 15, "num_tokens": 4500})
    assert train_with_room_for(600, shared, tmp_path / "train", model_folder, monkeypatch) == 500


def test_a_sequence_that_does_not_fit_alone_is_told_as_it_is(
    batch: TrainBatch, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainerOutOfMemory, match=r"OutOfMemoryError(.|\n)*"):
        train_with_room_for(600, batch, tmp_path / "train", model_folder, monkeypatch)


def test_on_a_gpu_a_step_leaves_its_peak_and_what_did_not_fit(
    batch: TrainBatch, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H100")
    assert train_with_room_for(900, batch, tmp_path / "train", model_folder, monkeypatch) == 800
    [note] = json.loads(Workspace.here().microbatches.read_bytes()).values()
    assert note["did_not_fit"] == 1600 and note["activation_bytes"] > 0.9 * 2**30 and note["estimated_bytes"] > 0


def test_on_a_cpu_nothing_is_noted(
    batch: TrainBatch, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_with_room_for(900, batch, tmp_path / "train", model_folder, monkeypatch)
    assert not Workspace.here().microbatches.exists()


def test_a_training_is_found_again_whatever_the_size_of_its_microbatches(
    batch: TrainBatch, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size follows what earlier steps measured: it may have changed between a kill and the next attempt."""
    adapter = AdapterVersion(
        run="run",
        version=0,
        base=BaseModelRef(id=str(model_folder), sha256="0"),
        rank=8,
        alpha=16,
        target_modules=("q_proj",),
        seed=0,
    )
    keys = [
        inputs_key(TrainerConfig().but(**changes), batch, adapter)
        for changes in ({}, {"max_tokens_per_microbatch": 700}, {"learning_rate": 1e-5})
    ]
    assert keys[0] == keys[1] != keys[2]
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert inputs_key(TrainerConfig(), batch, adapter) != keys[0]


@pytest.mark.parametrize(
    ("microbatch", "num_tokens", "longest", "expected"),
    [(4096, 1600, 700, 800), (800, 1600, 700, 700), (700, 1600, 700, None), (8192, 200000, 500, 4096), (256, 1600, 100, None)],
)
def test_no_microbatch_is_smaller_than_the_longest_sequence(
    microbatch: int, num_tokens: int, longest: int, expected: int | None
) -> None:
    config = TrainerConfig(max_tokens_per_microbatch=microbatch)
    assert smaller_microbatch(config, num_tokens=num_tokens, longest=longest) == expected


def a_next_version(workspace: Path, **num_steps: str) -> AdapterVersion:
    """Made of an adapter whose optimizer had taken 8 steps, and which an earlier version of Ratchet had made."""
    before = write(adapter_folder("run", 2) / "state/optimizer.safetensors", b"both moments")
    adapter = AdapterVersion(
        run="run",
        version=2,
        num_optimizer_steps=8,
        base=BaseModelRef(id="tiny", sha256="ab"),
        rank=4,
        alpha=8,
        target_modules=("q_proj",),
        seed=0,
        optimizer=record_of(before),
    )
    folder = adapter_folder("run", 3)
    (folder / "state").mkdir(parents=True)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, CANARY):
        (folder / name).write_bytes(b"content")
    for which, steps in num_steps.items():
        (folder / MOMENTS[which]).write_bytes(safetensors.numpy.save({which: np.zeros(1)}, {"num_optimizer_steps": steps}))
    return next_version(adapter)


def test_the_next_version_counts_rl_steps_and_the_optimizer_s_steps_apart(workspace: Path) -> None:
    made = a_next_version(workspace, exp_avg="12", exp_avg_sq="12")
    assert (made.version, made.num_optimizer_steps) == (3, 12)
    assert {which: file.path for which, file in made.moments.items()} == {
        which: f"runs/run/adapters/000003/{name}" for which, name in MOMENTS.items()
    }


def test_a_next_version_whose_moments_disagree_about_the_steps_is_none(workspace: Path) -> None:
    with pytest.raises(ValueError, match=r"do not belong together.*exp_avg.safetensors of 12, exp_avg_sq.safetensors of 11"):
        a_next_version(workspace, exp_avg="12", exp_avg_sq="11")


def test_an_adapter_counts_as_made_if_its_inputs_made_it_and_all_of_it_is_there(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = a_next_version(workspace, exp_avg="12", exp_avg_sq="12")
    folder, before = adapter_folder("run", 3), made.model_copy(update={"version": 2})
    names, inputs = [ADAPTER_WEIGHTS, ADAPTER_CONFIG, CANARY, *MOMENTS.values()], {"seed": "0"}
    result = write(workspace / "result.json", b"what the trainer said")
    write_json(folder / INPUTS_KEY, inputs)  # as an earlier version of Ratchet did
    assert committed(before, inputs, result) is None
    caplog.clear()
    write_json(folder / INPUTS_KEY, made_from(inputs, folder, moments_of(folder), result).model_dump())
    assert committed(before, inputs, result) == made
    assert committed(before, {"seed": "1"}, result) is None and not caplog.records
    for name in names:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1])  # as a power cut may leave it
        assert committed(before, inputs, result) is None
        assert f"not all of it is there ({name})" in caplog.text
        (folder / name).unlink()
        assert committed(before, inputs, result) is None
        (folder / name).write_bytes(whole)
    assert committed(before, inputs, result) == made
    said = result.read_bytes()
    result.write_bytes(b"what it said of another attempt")  # which did not come to publishing what it made
    assert committed(before, inputs, result) is None
    result.unlink()
    assert committed(before, inputs, result) is None
    assert "not all of it is there (result.json)" in caplog.text
    result.write_bytes(said)
    assert committed(before, inputs, result) == made


def moments_of(folder: Path) -> dict[str, str]:
    return {name: sha256_of(folder / name) for name in MOMENTS.values()}


@pytest.mark.parametrize("change", [{"sha256": ["x"]}, {"sha256": {ADAPTER_WEIGHTS: 5}}, {"result": None}])
def test_a_note_of_another_form_is_set_aside_and_the_adapter_trained_again(
    workspace: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    made = a_next_version(workspace, exp_avg="12", exp_avg_sq="12")
    folder, before = adapter_folder("run", 3), made.model_copy(update={"version": 2})
    result = write(workspace / "result.json", b"what the trainer said")
    note = made_from({"seed": "0"}, folder, moments_of(folder), result).model_dump()
    write_json(folder / INPUTS_KEY, note | change)
    assert committed(before, {"seed": "0"}, result) is None
    assert "made_from.json is set aside" in caplog.text


STATES = [tuple(MOMENTS.values()), ("state/optimizer.safetensors",)]
"""What Ratchet writes, and what an earlier version wrote."""


@pytest.mark.parametrize("names", STATES)
def test_one_cannot_go_on_from_an_adapter_whose_optimizer_state_was_removed_or_is_another_s(
    names: tuple[str, ...], batch: TrainBatch, model_folder: Path
) -> None:
    state = {Path(name).stem: write(adapter_folder("run", 0) / name, name.encode()) for name in names}
    base = BaseModelRef(id=str(model_folder), sha256="0")
    moments = {field: record_of(path) for field, path in state.items()}
    adapter = AdapterVersion(run="run", version=0, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0, **moments)
    job = job_of(TrainerConfig(), batch, adapter, model_folder)
    assert job.moments_sha256 == {field: file.sha256 for field, file in moments.items()}
    for path in state.values():
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(DigestMismatch, match=rf"{path} is missing"):
            job_of(TrainerConfig(), batch, adapter, model_folder)
        path.write_bytes(b"another version's")
        with pytest.raises(DigestMismatch, match=rf"{path} has changed since it was written"):
            job_of(TrainerConfig(), batch, adapter, model_folder)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "fields", [("exp_avg",), ("exp_avg_sq",), ("exp_avg", "exp_avg_sq", "optimizer"), ("exp_avg", "optimizer")]
)
def test_a_record_of_half_an_optimizer_state_cannot_be(fields: tuple[str, ...], batch: TrainBatch, model_folder: Path) -> None:
    base = BaseModelRef(id=str(model_folder), sha256="0")
    with pytest.raises(
        ValueError, match=f"adapter 3 of run 'run' has {' and '.join(fields)}: exp_avg and exp_avg_sq belong together"
    ):
        AdapterVersion(
            run="run",
            version=3,
            base=base,
            rank=8,
            alpha=16,
            target_modules=("q_proj",),
            seed=0,
            **dict.fromkeys(fields, batch.file),
        )


OLDER = TrainerConfig().but(loss={"correction": {"mode": "decoupled", "kind": "tis", "max_staleness": 1}})


def test_a_batch_of_the_adapter_before_is_for_a_trainer_that_allows_it_and_of_that_very_adapter(
    batch: TrainBatch, model_folder: Path
) -> None:
    weights = record_of(write(adapter_folder("run", 2) / ADAPTER_WEIGHTS, b"two"))
    before = record_of(write(adapter_folder("run", 1) / ADAPTER_WEIGHTS, b"one"))
    base = BaseModelRef(id=str(model_folder), sha256="0")
    adapter = AdapterVersion(
        run="run", version=2, base=base, rank=8, alpha=16, target_modules=("q_proj",), seed=0, weights=weights
    )
    older = batch.model_copy(update={"adapter_version": 1, "adapter_sha256": before.sha256})
    job = job_of(OLDER, older, adapter, model_folder)
    assert (job.adapter_version, job.sampler_version, job.sampler_sha256) == (2, 1, before.sha256)
    own = batch.model_copy(update={"adapter_version": 2, "adapter_sha256": weights.sha256})
    assert job_of(OLDER, own, adapter, model_folder).sampler_version is None
    two_before = batch.model_copy(update={"adapter_version": 0, "adapter_sha256": "base"})
    two_allowed = OLDER.but(loss=OLDER.loss.but(correction=OLDER.loss.correction.but(max_staleness=2)))
    assert job_of(two_allowed, two_before, adapter, model_folder).sampler_version == 0
    for config, wrong in (
        (TrainerConfig(), older),
        (OLDER, older.model_copy(update={"adapter_sha256": "ab"})),
        (OLDER, two_before),
    ):
        with pytest.raises(ValueError, match=rf"sampled by adapter {wrong.adapter_version} .* would go on from adapter 2"):
            job_of(config, wrong, adapter, model_folder)


def test_samples_of_another_model_are_refused_and_rounding_is_not(batch: TrainBatch) -> None:
    config = TrainerConfig()
    for found in ({}, {MISMATCH: 0.07}):
        refuse_foreign_samples(config, batch, found)
    with pytest.raises(
        TrainingFailed,
        match=r"step 0 of run 'run': .* is 0\.51, more than trainer\.max_mismatch 0\.5\. .* ratchet drop run --from 0",
    ):
        refuse_foreign_samples(config, batch, {MISMATCH: 0.51})
    refuse_foreign_samples(config.but(max_mismatch=None), batch, {MISMATCH: 9.0})
