"""A short text with the trainer's log-probs. The engine compares its own log-probs to verify that it serves exactly this adapter.

The base model's log-probs are the same in every step, so they are queued while the device still computes gradients. The
adapter's log-probs are computed afterwards.
"""

import torch
from torch import Tensor, nn

from infra.megatron.lora import layers as lora
from infra.megatron.loss.batch import Batch
from infra.megatron.loss.logprobs import token_logprobs
from infra.megatron.loss.microbatch import collate
from infra.megatron.model.build import logits_of
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.protocol.job import Canary

MAX_TOKENS = 256


class CanaryProbe:
    """The batch's first sequence, cut short, at temperature 1. Collective: all ranks compute the same."""

    def __init__(self, model: nn.Module, batch: Batch, layout: ParallelContext) -> None:
        self.model, self.group = model, layout.tp_group
        start = batch.starts[0]
        self.tokens = batch.tokens[start : min(batch.starts[1], start + MAX_TOKENS)]
        nothing = torch.zeros(len(self.tokens))
        sequence = Batch(
            adapter_version=batch.adapter_version,
            adapter_sha256=batch.adapter_sha256,
            temperature=1.0,
            tokens=self.tokens,
            starts=[0, len(self.tokens)],
            is_loss_token=torch.arange(len(self.tokens)) > 0,
            rollout_logprobs=nothing,
            advantages=nothing,
        )
        self.micro = collate(sequence, [0], nothing, multiple=layout.token_multiple, device=layout.device)
        self.base: Tensor | None = None

    def begin(self) -> None:
        """Compute the log-probs without the adapter. Waits for nothing."""
        lora.set_enabled(self.model, False)
        self.base = self._logprobs()
        lora.set_enabled(self.model, True)

    def end(self) -> Canary:
        """Compute the log-probs with the current adapter."""
        assert self.base is not None
        adapter = self._logprobs()
        return Canary(tokens=self.tokens.tolist(), base_logprobs=self.base.tolist(), adapter_logprobs=adapter.tolist())

    @torch.no_grad()
    def _logprobs(self) -> Tensor:
        """Compute the log-prob of each token but the first."""
        self.model.eval()
        values, _ = token_logprobs(logits_of(self.model, self.micro), self.micro.targets, temperature=1.0, group=self.group)
        self.model.train()
        return values
