"""Sizes of micro-batches that are left to the machine: by estimate, by measured peaks, after running out of memory."""

from math import prod
from pathlib import Path

import pytest
from shared import DENSE_7B

from infra.colocation import microbatch, plans
from infra.colocation.machine import Machine
from infra.colocation.trainer_memory import Model, activation_bytes, held_bytes
from infra.config import EngineConfig, LoraConfig, RunConfig, TrainerConfig
from infra.machine import devices
from infra.machine.nvml import GIB
from infra.models.architecture import base_shapes, parse_architecture
from infra.store import files
from infra.store.layout import Workspace

H200 = Machine(is_gpu=True, gpu_bytes=int(139.8 * GIB), is_split=False, host_bytes=125 * GIB)
ROOM = 100 * GIB
LORA = LoraConfig(rank=16, alpha=16)


@pytest.fixture(autouse=True)
def _on_a_gpu(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device", lambda: "cuda")
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H200")


@pytest.fixture
def model() -> Model:
    architecture = parse_architecture(dict(DENSE_7B))
    return Model(2 * sum(map(prod, base_shapes(architecture).values())), architecture)


def tokens(trainer: TrainerConfig, model: Model, room: int = ROOM, longest: int = 1024) -> int:
    return microbatch.largest(trainer, model, room_bytes=room, longest=longest).tokens


def note(trainer: TrainerConfig, model: Model, correction: float, num_tokens: int = 8192) -> None:
    """A step whose activations took so many times what is estimated."""
    estimated = activation_bytes(trainer, model, num_rows=num_tokens, num_logits=num_tokens)
    peak = (held_bytes(trainer, model) + correction * estimated) / GIB
    microbatch.note_peak(trainer, model, peak_gib=peak, num_rows=num_tokens, num_logits=num_tokens)


def test_the_first_size_fills_the_room_by_estimate(model: Model) -> None:
    trainer = TrainerConfig(lora=LORA)
    found = microbatch.largest(trainer, model, room_bytes=ROOM, longest=1024)
    taken = held_bytes(trainer, model) + activation_bytes(trainer, model, num_rows=found.tokens, num_logits=found.tokens)
    a_step = activation_bytes(trainer, model, num_rows=1024, num_logits=1024)
    assert ROOM - microbatch.ESTIMATE_MARGIN_BYTES - a_step < taken <= ROOM - microbatch.ESTIMATE_MARGIN_BYTES
    assert found.reason.startswith(f"{found.tokens} tokens: ") and found.reason.endswith("as estimated")


def test_a_peak_is_remembered_without_waiting_for_the_disk(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is between training and the next rollout, when an adapter's gigabytes are on their way to the disk."""
    trainer = TrainerConfig(lora=LORA)
    estimated = tokens(trainer, model)
    monkeypatch.setattr(files, "sync", lambda path: pytest.fail(f"{path} is waited for"))
    note(trainer, model, 0.8)
    assert tokens(trainer, model) > estimated


def test_a_measured_peak_corrects_the_estimate_in_both_directions(model: Model) -> None:
    trainer = TrainerConfig(lora=LORA)
    estimated = tokens(trainer, model)
    note(trainer, model, 0.8)
    assert tokens(trainer, model) > 1.2 * estimated
    note(trainer, model, 1.3)
    assert tokens(trainer, model) < 0.85 * estimated
    assert "as measured" in microbatch.largest(trainer, model, room_bytes=ROOM, longest=1024).reason


def test_a_smaller_microbatch_than_the_measured_one_teaches_nothing(model: Model) -> None:
    trainer = TrainerConfig(lora=LORA)
    note(trainer, model, 0.8, num_tokens=8192)
    before = tokens(trainer, model)
    note(trainer, model, 1.5, num_tokens=4096)
    assert tokens(trainer, model) == before


@pytest.mark.parametrize(
    "changes", [{"recompute": True}, {"lora": LoraConfig(rank=8, alpha=16)}, {"num_processes": 2, "tensor_parallel": 2}]
)
def test_what_was_measured_is_of_one_layout_and_gpu(
    changes: dict[str, object], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TrainerConfig(lora=LORA)
    other = trainer.but(**changes)
    before = tokens(other, model)
    note(trainer, model, 2.0)
    assert tokens(other, model) == before
    measured = tokens(trainer, model)
    monkeypatch.setattr(devices, "processor", lambda: "NVIDIA H100")
    assert tokens(trainer, model) > measured


def test_a_size_that_ran_out_of_memory_is_not_tried_again(model: Model) -> None:
    trainer = TrainerConfig(lora=LORA)
    size = tokens(trainer, model)
    microbatch.note_out_of_memory(trainer, model, tokens=size)
    again = microbatch.largest(trainer, model, room_bytes=ROOM, longest=1024)
    assert again.tokens == size // 2 // 1024 * 1024 and f"{size} tokens, which ran out of memory before" in again.reason
    microbatch.note_out_of_memory(trainer, model, tokens=4 * size)
    assert tokens(trainer, model) == again.tokens, "the smallest that did not fit counts"


def test_sizes_end_at_the_longest_sequence_and_where_more_gains_nothing(model: Model) -> None:
    trainer = TrainerConfig(lora=LORA)
    assert tokens(trainer, model, room=10 * GIB, longest=3000) == 3000
    assert tokens(trainer, model, room=10_000 * GIB) == microbatch.MOST_TOKENS


def test_notes_that_were_cut_off_are_made_again(model: Model) -> None:
    trainer = TrainerConfig(lora=LORA)
    before = tokens(trainer, model)
    Workspace.here().microbatches.write_text('{"a": {')
    assert tokens(trainer, model) == before


@pytest.mark.parametrize(
    ("colocation", "left_gib"), [("keep_weights", 122.9), ("reload", 137.1), ("restart", 139.8), ("separate_gpus", 139.8)]
)
def test_the_trainers_room_is_what_the_colocation_plan_leaves(colocation: str, left_gib: float, model: Model) -> None:
    engine = EngineConfig.model_validate({"colocation": colocation})
    assert plans.left_to_trainer_bytes(engine, model, H200) / GIB == pytest.approx(left_gib, abs=0.1)


def test_a_step_gets_a_number_and_its_reason(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "this_machine", lambda: H200)
    config = RunConfig(model=str(model_folder))
    found = plans.resolve_colocation(config)
    assert found.trainer.max_tokens_per_microbatch == microbatch.MOST_TOKENS, "a tiny model"
    assert "more than 65536 gain nothing" in found.plan.microbatches
    by_hand = plans.resolve_colocation(config.but(trainer={"max_tokens_per_microbatch": 700}))
    assert (by_hand.trainer.max_tokens_per_microbatch, by_hand.plan.microbatches[:10]) == (700, "700 tokens")
    monkeypatch.setattr(devices, "device", lambda: "cpu")
    on_cpu = plans.resolve_colocation(config)
    assert (on_cpu.trainer.max_tokens_per_microbatch, on_cpu.plan.microbatches) == (16384, "16384 tokens, on a CPU")
