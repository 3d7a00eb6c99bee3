"""What a program keeps from job to job is what it would have read, and nothing else is ever gone on from."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infra.megatron.__main__ import run
from infra.megatron.lora.layers import LoraLinear
from infra.megatron.model.experts.layer import ExpertAdapters
from infra.megatron.program.session import TrainerSession
from infra.megatron.protocol.optimizer_files import MOMENTS

Job = Callable[..., Any]
KEPT, READ = "its optimizer state: kept", "its optimizer state: read from"
# The second mini-batch begins from what the first has changed.
TWO_MINIBATCHES = {"num_minibatches": 2}


@pytest.fixture
def session() -> Iterator[TrainerSession]:
    """Of a program that stays: this one."""
    made = TrainerSession(stays=True)
    yield made
    made.end()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What was logged since the last time."""
    caplog.set_level(logging.INFO, "infra")

    def take() -> str:
        text = caplog.text
        caplog.clear()
        return text

    return take


def assert_same_bytes(made: Any, expected: Any) -> None:
    names = sorted(path.relative_to(expected.job.output_dir) for path in expected.job.output_dir.rglob("*") if path.is_file())
    assert set(MOMENTS.values()) <= set(map(str, names))
    for name in names:
        assert (made.job.output_dir / name).read_bytes() == (expected.job.output_dir / name).read_bytes(), name
    assert made.metrics == expected.metrics


def layers_on(session: TrainerSession) -> list[LoraLinear | ExpertAdapters]:
    """The adapter's, between two jobs: without gradients, and ready to train."""
    assert session.net is not None
    assert all(parameter.grad is None for parameter in session.net.parameters())
    assert all(module.training for module in session.net.modules())
    layers = [module for module in session.net.modules() if isinstance(module, LoraLinear | ExpertAdapters)]
    assert all(layer.enabled for layer in layers)
    return layers


@pytest.mark.parametrize("sleep_weights", ["gpu", "host", "disk"])
def test_steps_that_go_on_from_what_was_kept_give_the_bytes_of_those_that_read(
    sleep_weights: str, new_job: Job, train: Job, session: TrainerSession, said: Callable[[], str]
) -> None:
    expected = [train("qwen3-moe", **TWO_MINIBATCHES)]
    for _ in range(3):
        expected.append(train("qwen3-moe", after=expected[-1], **TWO_MINIBATCHES))
    said()
    last, layers = None, []
    for alone in expected:
        made = new_job("qwen3-moe", after=last, sleep_weights=sleep_weights, **TWO_MINIBATCHES)
        assert run(made.path, session) == 0
        assert_same_bytes(made, alone)
        text = said()
        assert (KEPT in text) == (last is not None and sleep_weights != "disk")
        assert (READ in text) == (last is not None and sleep_weights == "disk")
        last = made
        layers.append(layers_on(session))
    assert bool(layers[0]) == (sleep_weights == "gpu")
    assert layers == [layers[0]] * len(expected)  # modules: equal means the same


WIDE = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}}
STRONG = {"lora": {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "down_proj"]}}


@pytest.mark.parametrize("sleep_weights", ["gpu", "host"])
def test_whatever_job_came_before_its_layers_and_values_are_those_of_a_program_of_its_own(
    sleep_weights: str, new_job: Job, train: Job, make_batch: Job, session: TrainerSession
) -> None:
    name = "qwen3-moe"
    first, wide, strong = train(name), train(name, **WIDE), train(name, **STRONG)
    other, second, after_strong = train(name, job={"seed": 1}), train(name, after=first), train(name, after=strong, **STRONG)
    third = train(name, after=second)
    before: list[LoraLinear | ExpertAdapters] = []
    for expected, after, changes, num_layers, takes_them in (
        (first, None, {}, 6, False),
        (second, first, {}, 6, True),
        (other, None, {"job": {"seed": 1}}, 6, True),
        (first, None, {}, 6, True),
        (third, second, {}, 6, True),
        (second, first, {}, 6, True),  # an older version
        (wide, None, WIDE, 4, False),
        (strong, None, STRONG, 4, False),  # of the same shapes
        (after_strong, strong, STRONG, 4, True),
        (third, second, {}, 6, False),
        (None, second, {"batch": not_finite_in_the_second_minibatch(make_batch()), **TWO_MINIBATCHES}, 0, False),
        (first, None, {}, 6, False),
        (second, first, {}, 6, True),
    ):
        made = new_job(name, after=after, sleep_weights=sleep_weights, **changes)
        assert run(made.path, session) == (0 if expected else 3)
        if expected:
            assert_same_bytes(made, expected)
        layers = layers_on(session)
        assert len(layers) == (num_layers if sleep_weights == "gpu" else 0)
        assert {layer.rank for layer in layers} <= {made.job.trainer.lora.rank}
        if layers:
            assert (layers == before) == takes_them
        before = layers


@pytest.mark.parametrize("sleep_weights", ["gpu", "host"])
def test_a_job_that_goes_on_from_anything_else_reads_it(
    sleep_weights: str, new_job: Job, train: Job, session: TrainerSession, said: Callable[[], str]
) -> None:
    first, other = train(), train(job={"seed": 1})
    second, others_second = train(after=first), train(after=other)
    moments = new_job(after=first).job.moments_sha256
    said()
    for after, job, expected, how in (
        (first, {}, second, KEPT),
        (other, {}, others_second, READ),
        (first, {"moments_sha256": {}}, second, READ),
        *((first, {"moments_sha256": moments | {which: "0" * 64}}, second, READ) for which in MOMENTS),
        *((first, {"moments_sha256": {which: moments[which]}}, second, READ) for which in MOMENTS),
    ):
        before, made = new_job(sleep_weights=sleep_weights), new_job(after=after, job=job, sleep_weights=sleep_weights)
        assert [run(each.path, session) for each in (before, made)] == [0, 0]
        assert_same_bytes(before, first)
        assert how in said()
        assert_same_bytes(made, expected)
    again = new_job(after=first, sleep_weights=sleep_weights)  # what was kept once, but is not the last
    assert run(again.path, session) == 0
    assert READ in said()
    assert_same_bytes(again, second)


def test_another_lora_shape_gets_memory_of_its_own(
    new_job: Job, train: Job, session: TrainerSession, said: Callable[[], str]
) -> None:
    wide = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}}
    expected = [train(), train(**wide)]
    expected.append(train(after=expected[1], **wide))
    said()
    first, second = new_job(), new_job(**wide)
    assert [run(made.path, session) for made in (first, second)] == [0, 0]
    third = new_job(after=second, **wide)
    assert run(third.path, session) == 0
    assert KEPT in said()
    for made, alone in zip((first, second, third), expected, strict=True):
        assert_same_bytes(made, alone)


def not_finite_in_the_second_minibatch(batch: dict[str, Any]) -> dict[str, Any]:
    """Its samples are much too likely, and that by so much worse than others that the loss is infinite."""
    middle = int(batch["cu_seqlens"][4])
    batch["rollout_logprobs"][middle:] = torch.where(batch["loss_mask"][middle:] == 1, -30.0, 0.0)
    batch["advantages"][middle:] = torch.where(batch["loss_mask"][middle:] == 1, -3e38, 0.0)
    return batch


@pytest.mark.parametrize("sleep_weights", ["gpu", "host"])
@pytest.mark.parametrize("failure", ["after a mini-batch that was trained", "refused"])
def test_a_job_that_failed_leaves_nothing_to_go_on_from(
    failure: str, sleep_weights: str, new_job: Job, train: Job, make_batch: Job, session: TrainerSession, said: Callable[[], str]
) -> None:
    first = train()
    expected = train(after=first)
    mine = new_job(sleep_weights=sleep_weights)
    assert run(mine.path, session) == 0
    assert_same_bytes(mine, first)
    if failure == "refused":
        bad, code = make_batch(), 2
        bad["tokens"][0] = 999
    else:
        bad, code = not_finite_in_the_second_minibatch(make_batch()), 3
    failing = new_job(after=mine, batch=bad, sleep_weights=sleep_weights, **TWO_MINIBATCHES)
    assert run(failing.path, session) == code
    assert not layers_on(session)
    assert (KEPT in said()) == (code == 3)  # it had begun with what was kept, and has changed it
    again = new_job(after=mine, sleep_weights=sleep_weights)
    assert run(again.path, session) == 0
    assert READ in said()
    assert_same_bytes(again, expected)


def with_other_values(folder: Path, target: Path) -> Path:
    """An adapter whose optimizer state is not what it was: whoever reads it goes on otherwise."""
    shutil.copytree(folder, target)
    for path in (target / name for name in MOMENTS.values()):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        other = {name: torch.full_like(tensor, 0.5) for name, tensor in load_file(path).items()}
        save_file(other, path, metadata)
    return target


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"sleep_weights": "host"}),
    ("qwen3", {"tensor_parallel": 2, "sleep_weights": "gpu"}),
    ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True, "sleep_weights": "host"}),
    ("qwen3-moe", {"tensor_parallel": 2, "sequence_parallel": True, "sleep_weights": "gpu"}),
    ("qwen3-moe", {"expert_parallel": 2, "sleep_weights": "host"}),
    ("qwen3-moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "sleep_weights": "host"}),
]


@pytest.mark.full
def test_every_rank_of_every_layout_goes_on_from_its_own(
    new_job: Job, train_on_two: Callable[[list[Any]], None], train_on_two_unequal: Callable[[list[Any]], None], tmp_path: Path
) -> None:
    layouts = [(name, {"num_processes": 2} | layout) for name, layout in LAYOUTS]
    firsts = [new_job(name, **layout) for name, layout in layouts]
    train_on_two(firsts)
    alone, kept = [], []
    for i, ((name, layout), first) in enumerate(zip(layouts, firsts, strict=True)):
        damaged = with_other_values(first.job.output_dir, tmp_path / str(i))
        alone.append(new_job(name, after=first, **layout))
        kept.append((new_job(name, **layout), new_job(name, after=first, job={"adapter_path": damaged}, **layout)))
    train_on_two(alone)
    train_on_two_unequal(kept)
    for first, second, made in zip(firsts, alone, kept, strict=True):
        assert_same_bytes(made[0], first)
        assert_same_bytes(made[1], second)


def test_a_job_does_not_wait_for_the_disk(train: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: waited_for.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    assert train("qwen3").job.result_path.exists()
    assert waited_for == [], "the commit does, while the engine samples"
