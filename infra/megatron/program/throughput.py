"""How fast a step was, and what share of the GPU's arithmetic it used."""

import torch

from infra.config import LoraConfig
from infra.machine import devices
from infra.megatron.lora.peft_files import adapter_shapes
from infra.megatron.loss.batch import Batch
from infra.models.architecture import Architecture, linear_shapes, num_active


def figures(a: Architecture, lora: LoraConfig, batch: Batch, seconds: float, *, num_gpus: int) -> dict[str, float]:
    """Return train/tokens_per_s over the trained sequences, and train/mfu where the GPU's peak is known."""
    lengths = [batch.length(s) for s in range(batch.num_sequences) if batch.num_loss_tokens(s)]
    found = {"train/tokens_per_s": sum(lengths) / seconds}
    if num_gpus and (peak := devices.peak_flops(torch.cuda.get_device_name())):
        found["train/mfu"] = step_flops(a, lora, lengths) / seconds / (peak * num_gpus)
    return found


def step_flops(a: Architecture, lora: LoraConfig, lengths: list[int]) -> float:
    """FLOPs of one step, forward and backward. The frozen base has no weight gradients: 4 FLOPs per weight and token, not 6. The backward
    pass of attention counts 2.5 times its forward pass. Recomputation is not counted."""
    linear = num_active(a, {name: out * into for name, (out, into) in linear_shapes(a).items()})
    linear += a.hidden_size * (a.vocab_size + (a.num_layers * a.experts.count if a.experts else 0))
    adapters = num_active(a, {name: out * into for name, (out, into) in adapter_shapes(a, lora).items()})
    attention = sum(4 * a.num_heads * a.head_dim * length**2 / 2 for length in lengths) * a.num_layers
    return (4 * linear + 6 * adapters) * sum(lengths) + 3.5 * attention
