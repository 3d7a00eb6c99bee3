"""Log-probs of a batch before the first optimizer step: the current policy's, and the base model's (adapters off).

The passes have no gradients and use the micro-batches of the training that follows, so the first mini-batch's ratios are exactly 1.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infra.config import KlConfig, TrainerConfig
from infra.data import advantages
from infra.megatron.lora import layers as lora
from infra.megatron.loss.batch import Batch
from infra.megatron.loss.logprobs import token_logprobs
from infra.megatron.loss.microbatch import collate
from infra.megatron.loss.objectives import kl_penalties
from infra.megatron.model.build import logits_of
from infra.megatron.model.parallel import ParallelContext


def with_policies(
    model: nn.Module, batch: Batch, microbatches: list[list[int]], t: TrainerConfig, layout: ParallelContext
) -> Batch:
    """Return the batch with the log-probs that the loss needs, for this rank's sequences. No pass is run if none is needed. Collective."""
    c = t.loss
    is_in_reward = c.kl.coefficient > 0 and c.kl.where == "reward"
    # Where no optimizer step was taken in between, the training pass itself sees the old policy.
    if c.correction.mode == "decoupled" and (t.num_minibatches > 1 or is_in_reward):
        batch = dataclasses.replace(batch, old_logprobs=logprobs_of(model, batch, microbatches, layout))
    if c.kl.coefficient > 0:
        lora.set_enabled(model, False)
        # The base model is another policy than the one whose routes were recorded, and chooses its own.
        own_routes = dataclasses.replace(batch, routes=None)
        batch = dataclasses.replace(batch, reference_logprobs=logprobs_of(model, own_routes, microbatches, layout))
        lora.set_enabled(model, True)
    if is_in_reward:
        sums = kl_of_sequences(batch, c.kl, [s for micro in microbatches for s in micro])
        sums = sums.to(layout.device)
        dist.all_reduce(sums, group=layout.dp_group)
        batch = penalised(batch, [c.kl.coefficient * kl for kl in sums.tolist()])
    return batch


@torch.no_grad()
def logprobs_of(model: nn.Module, batch: Batch, microbatches: list[list[int]], layout: ParallelContext) -> Tensor:
    """float32 [T] on the CPU: log-probs of the loss tokens of these sequences under the current model; 0 elsewhere."""
    result = torch.zeros(len(batch.tokens))
    nothing = torch.zeros(len(batch.tokens))
    model.eval()
    for sequences in microbatches:
        micro = collate(batch, sequences, nothing, multiple=layout.token_multiple, device=layout.device)
        logprobs, _ = token_logprobs(logits_of(model, micro), micro.targets, temperature=batch.temperature, group=layout.tp_group)
        result[micro.loss_tokens] = logprobs.float().cpu()
    model.train()
    return result


def kl_of_sequences(batch: Batch, kl: KlConfig, sequences: list[int]) -> Tensor:
    """float64 [S]: for each of these sequences the sum of the KL penalties of its loss tokens; 0 for the others."""
    assert batch.reference_logprobs is not None
    old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    penalties = kl_penalties(kl.estimator, old, batch.reference_logprobs).double() * batch.is_loss_token
    sums = torch.zeros(batch.num_sequences, dtype=torch.float64)
    for s in sequences:
        sums[s] = penalties[batch.span(s)].sum()
    return sums


def penalised(batch: Batch, penalties: list[float]) -> Batch:
    """Return the batch with advantages recomputed from rewards minus each sequence's penalty."""
    assert batch.rewards and batch.groups and batch.advantage
    rewards = [reward - penalty for reward, penalty in zip(batch.rewards, penalties, strict=True)]
    num_tokens = [batch.num_loss_tokens(s) for s in range(batch.num_sequences)]
    values = torch.zeros_like(batch.advantages)
    for s, advantage in enumerate(advantages.of_batch(batch.advantage, rewards, batch.groups, num_tokens, batch.episodes)):
        values[batch.span(s)] = advantage
    return dataclasses.replace(batch, advantages=values * batch.is_loss_token)
