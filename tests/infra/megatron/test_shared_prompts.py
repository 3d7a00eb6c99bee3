"""What sequences have in common is computed once, with the loss and the gradients of sequences that are computed each for itself.

The two are the same batch with and without its `groups`: without them each sequence is a group of its own. `pytest -rP` shows the distances.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.megatron.checkpoint import save as checkpoint
from infra.megatron.lora import layers as lora
from infra.megatron.loss.batch import read_batch
from infra.megatron.loss.microbatch import pack
from infra.megatron.model import base_weights, build, parallel
from infra.megatron.program import optimizer
from infra.megatron.program.train_step import train_step
from infra.megatron.protocol.optimizer_files import MOMENTS
from infra.models.architecture import read_architecture

VOCAB_SIZE = 512
NewJob = Callable[..., Any]
MakeTree = Callable[..., dict[str, Tensor]]
FREE: dict[str, Any] = {"max_grad_norm": 1e9, "learning_rate": 1e-30}
"""Gradients as they are, and an adapter that stays as it is."""
DECOUPLED = {"mode": "decoupled", "kind": "tis", "cap": 1.5}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "token mean": {},
    "sequence mean": {"loss": {"aggregation": "seq_mean_token_mean", "entropy_bonus": 0.05}},
    "sequence sum": {"loss": {"kind": "cispo", "aggregation": "seq_mean_token_sum_norm", "loss_scale_factor": 30}},
    "sequence ratios": {"loss": {"kind": "gspo", "correction": DECOUPLED | {"level": "sequence"}}},
    "reference": {"loss": {"kl": {"coefficient": 0.5}, "correction": DECOUPLED}, "num_minibatches": 2},
    "small micro-batches": {"max_tokens_per_microbatch": 32},
    "recomputed": {"recompute": True},
}


def in_float64(job: Any, groups: list[int] | None) -> tuple[Tensor, dict[str, float]]:
    """One step, all of it in float64, from adapters that are not zero: its gradient, and its metrics."""
    batch, a, layout = read_batch(job.batch_path), read_architecture(job.model_path), parallel.start(job)
    batch = dataclasses.replace(batch, groups=groups, rollout_logprobs=batch.rollout_logprobs.double())
    net = build.build(a, job.trainer, layout)
    base_weights.load_base(net, job.model_path, a, layout)
    shards = lora.attach(net, a, job.trainer.lora, layout, sequence_parallel=False)
    checkpoint.load(job, a, shards, optimizer.build(shards, job.trainer), layout)
    net.double()
    net.get_submodule("rotary").dtype = torch.float64
    generator = torch.Generator().manual_seed(1)
    for shard in shards:
        if "lora_B" in shard.name:
            shard.parameter.data.normal_(0, 0.05, generator=generator)
    adam = optimizer.build(shards, job.trainer)
    metrics, _ = train_step(net, shards, adam, batch, job.trainer, layout, meanwhile=lambda: None)
    parallel.stop()
    gradients = [shard.parameter.grad for shard in shards]
    assert all(gradient is not None and gradient.dtype is torch.float64 and gradient.any() for gradient in gradients)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]), metrics


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "qwen3-moe"])
def test_in_float64_loss_and_gradients_are_those_of_separate_sequences(
    name: str, objective: str, new_job: NewJob, make_tree: MakeTree
) -> None:
    settings = OBJECTIVES[objective]
    job = new_job(name, batch=make_tree(), **FREE | settings).job
    groups = read_batch(job.batch_path).groups
    assert groups
    shared, metrics = in_float64(job, groups)
    # Mini-batches are cut between groups, so with several of them the groups have to be the same, yet share nothing.
    with pytest.MonkeyPatch.context() as patch:
        if "num_minibatches" in settings:
            patch.setattr("infra.data.prefix_tree.num_shared", lambda a, b: 0)
            patch.setattr("infra.megatron.loss.microbatch.num_shared", lambda a, b: 0)
        separate, expected = in_float64(job, groups if "num_minibatches" in settings else None)
    found = float((shared - separate).norm() / separate.norm())
    print(f"{name}, {objective}: {found:.1e}")
    assert found < 1e-10
    assert metrics == pytest.approx(expected, rel=1e-10, abs=1e-12)


TWO = {"num_processes": 2}
SEQUENCE = TWO | {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("qwen3", TWO),
    "tensor parallel": ("qwen3", TWO | {"tensor_parallel": 2}),
    "sequence parallel": ("qwen3", SEQUENCE),
    "sequence parallel, recomputed": ("qwen3", SEQUENCE | {"recompute": True}),
    "expert parallel": ("qwen3-moe", TWO | {"expert_parallel": 2}),
    "sequence and expert parallel": ("qwen3-moe", SEQUENCE | {"expert_parallel": 2}),
}


def prompts_and_answers() -> dict[str, Tensor]:
    """Four prompts of 48 tokens, each with six answers of 20 to 40."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 41, (24,), generator=generator).tolist()
    prompts = [torch.randint(0, VOCAB_SIZE, (48,), generator=generator) for _ in range(4)]
    answers = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    is_loss = torch.cat([torch.arange(48 + length) >= 48 for length in lengths])
    advantages = torch.randn(24, generator=generator).repeat_interleave(48 + torch.tensor(lengths))
    return {
        "tokens": torch.cat([part for i, answer in enumerate(answers) for part in (prompts[i // 6], answer)]),
        "cu_seqlens": torch.tensor([0, *(48 + length for length in lengths)]).cumsum(0),
        "loss_mask": is_loss.to(torch.uint8),
        "rollout_logprobs": (-6.5 + 0.4 * torch.randn(len(is_loss), generator=generator)) * is_loss,
        "advantages": advantages * is_loss,
        "groups": torch.arange(24) // 6,
    }


def apart(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values for name, values in batch.items() if name != "groups"}


@pytest.fixture(scope="session")
def in_layouts(new_job: NewJob, train_on_two: Callable[..., None], make_tree: MakeTree) -> dict[tuple[str, str], Any]:
    """In float32, by real processes."""
    simple, runs = prompts_and_answers(), {}
    for layout, (name, trainer) in LAYOUTS.items():
        kinds = {"shared": simple, "separate": apart(simple), "tree": make_tree(), "separate tree": apart(make_tree())}
        runs |= {(layout, kind): new_job(name, batch=batch, **FREE | trainer) for kind, batch in kinds.items()}
        small = {"max_tokens_per_microbatch": 90}
        runs[layout, "other micro-batches"] = new_job(name, batch=apart(simple), **FREE | trainer | small)
    train_on_two(list(runs.values()))
    return runs


def gradient_of(run: Any) -> Tensor:
    """Up to a factor: the optimizer's first moment after its first step."""
    return torch.cat([moment.flatten() for name, moment in sorted(run.moments.items()) if name.startswith("exp_avg.")]).double()


def distance(run: Any, other: Any) -> float:
    return float((gradient_of(run) - gradient_of(other)).norm() / gradient_of(other).norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_the_gradients_are_those_of_separate_sequences(
    layout: str, in_layouts: dict[tuple[str, str], Any]
) -> None:
    shared, separate, other = (in_layouts[layout, kind] for kind in ("shared", "separate", "other micro-batches"))
    found, noise = distance(shared, separate), distance(other, separate)
    print(f"{layout}: {found:.1e}, other micro-batches {noise:.1e}")
    assert 0 < found < min(1e-5, 2 * noise)
    assert shared.metrics == pytest.approx(separate.metrics, rel=2e-5, abs=1e-7)
    tree, expected = (in_layouts[layout, kind] for kind in ("tree", "separate tree"))
    print(f"{layout}, tree: {distance(tree, expected):.1e}")
    assert 0 < distance(tree, expected) < 1e-5
    assert tree.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-7)


def test_the_same_job_twice_gives_the_same_bytes(train: NewJob, make_tree: MakeTree) -> None:
    loss = {"kl": {"coefficient": 0.1}, "correction": DECOUPLED}
    first, second = (train("qwen3-moe", batch=make_tree(), num_minibatches=2, loss=loss) for _ in range(2))
    paths = sorted(path for path in first.job.output_dir.rglob("*") if path.is_file())
    assert {Path(name) for name in MOMENTS.values()} < {path.relative_to(first.job.output_dir) for path in paths}
    for path in paths:
        assert path.read_bytes() == (second.job.output_dir / path.relative_to(first.job.output_dir)).read_bytes(), path.name


def test_a_log_says_how_many_rows_were_computed(train: NewJob, make_tree: MakeTree, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "infra")
    made = train(batch=make_tree())
    batch = read_batch(made.job.batch_path)
    trained = [s for s in range(batch.num_sequences) if batch.num_loss_tokens(s)]
    rows = sum(batch.tree([s]).num_rows for s in trained)
    (message,) = [message for message in caplog.messages if message.startswith("micro-batch 1/1")]
    shared = int(message.split("  ")[1].split()[0])
    assert shared == batch.tree(pack(batch, trained, 10**6)[0]).num_rows < rows
