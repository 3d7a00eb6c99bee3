"""A short text with what the trainer says of it: how the engine's side finds out that it serves this very adapter."""

import torch
from torch import nn

from infra.megatron import lora
from infra.megatron.batch import Batch, collate
from infra.megatron.job import Canary
from infra.megatron.layout import Layout
from infra.megatron.loss import token_logprobs
from infra.megatron.model import logits_of

MAX_TOKENS = 64


@torch.no_grad()
def sing(model: nn.Module, batch: Batch, layout: Layout) -> Canary:
    """The batch's first sequence, cut short, at temperature 1. Collective: all ranks compute the same."""
    start = batch.starts[0]
    tokens = batch.tokens[start : min(batch.starts[1], start + MAX_TOKENS)]
    sequence = Batch(
        adapter_version=batch.adapter_version,
        adapter_sha256=batch.adapter_sha256,
        temperature=1.0,
        tokens=tokens,
        starts=[0, len(tokens)],
        is_loss_token=torch.ones_like(tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(len(tokens)),
        advantages=torch.zeros(len(tokens)),
    )
    micro = collate(sequence, [0], torch.zeros(len(tokens)), multiple=layout.token_multiple, device=layout.device)
    logprobs = {}
    model.eval()
    for enabled in (False, True):
        lora.set_enabled(model, enabled)
        values, _ = token_logprobs(logits_of(model, micro), micro.targets, temperature=1.0, group=layout.tp_group)
        logprobs[enabled] = values[: len(tokens) - 1].tolist()
    model.train()
    return Canary(tokens=tokens.tolist(), base_logprobs=logprobs[False], adapter_logprobs=logprobs[True])
