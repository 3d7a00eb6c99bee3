"""How fast a step was, and what share of the GPU's arithmetic it used."""

from typing import NamedTuple

import torch

from infra.config import LoraConfig
from infra.machine import devices
from infra.megatron.lora.peft_files import adapter_shapes
from infra.megatron.loss.batch import Batch
from infra.megatron.loss.microbatch import groups_of
from infra.models.architecture import Architecture, linear_shapes, num_active


class Computed(NamedTuple):
    """What one pass over a batch computes, each shared row once."""

    num_rows: int
    num_logits: int
    """Rows of the output layer."""
    num_attended: float
    """Pairs of a row and a row that it attends to."""


def figures(a: Architecture, lora: LoraConfig, batch: Batch, seconds: float, *, num_gpus: int) -> dict[str, float]:
    """Return train/tokens_per_s over the trained sequences, each with its prompt, and train/mfu where the GPU's peak is known."""
    trained = [s for s in range(batch.num_sequences) if batch.num_loss_tokens(s)]
    found = {"train/tokens_per_s": sum(map(batch.length, trained)) / seconds}
    if num_gpus and (peak := devices.peak_flops(torch.cuda.get_device_name())):
        found["train/mfu"] = step_flops(a, lora, work_of(batch, trained)) / seconds / (peak * num_gpus)
    return found


def work_of(batch: Batch, sequences: list[int]) -> Computed:
    """Return what a step computes for these sequences: rows, which a group shares, logits, and pairs of a row and a key."""
    trees = [batch.tree(group) for group in groups_of(batch, sequences)]
    num_logits = sum(map(batch.num_loss_tokens, sequences))
    return Computed(sum(tree.num_rows for tree in trees), num_logits, sum(tree.num_attended for tree in trees))


def step_flops(a: Architecture, lora: LoraConfig, work: Computed) -> float:
    """FLOPs of one step, forward and backward. The frozen base has no weight gradients: 4 FLOPs per weight and token, not 6. The backward
    pass of attention counts 2.5 times its forward pass. Recomputation is not counted."""
    linear = num_active(a, {name: out * into for name, (out, into) in linear_shapes(a).items()})
    linear += a.hidden_size * a.num_layers * a.experts.count if a.experts else 0
    adapters = num_active(a, {name: out * into for name, (out, into) in adapter_shapes(a, lora).items()})
    attention = 4 * a.num_heads * a.head_dim * work.num_attended * a.num_layers
    logits = 4 * a.hidden_size * a.vocab_size * work.num_logits
    return (4 * linear + 6 * adapters) * work.num_rows + logits + 3.5 * attention
