"""Run the optimizer steps on one batch.

log-probs before the first step, where the loss needs them -> mini-batches, one optimizer step each -> metrics over all of them
"""

import functools
import logging
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infra.config import TrainerConfig
from infra.megatron.lora import layers as lora
from infra.megatron.lora.layers import Shard
from infra.megatron.loss.batch import Batch, split, token_weights
from infra.megatron.loss.logprobs import backward_microbatch
from infra.megatron.loss.metrics import Totals
from infra.megatron.loss.microbatch import collate, pack, spread
from infra.megatron.loss.reference_logprobs import with_policies
from infra.megatron.model.build import logits_of
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.program import optimizer

log = logging.getLogger(__name__)


class MicroBatchSize(NamedTuple):
    """Of a micro-batch."""

    num_rows: int
    num_logits: int
    """Loss tokens: rows of the output layer."""


class NotFinite(ArithmeticError):
    """A metric is NaN or infinite: this step must not be saved."""


def train_step(
    model: nn.Module,
    shards: list[Shard],
    adam: torch.optim.AdamW,
    batch: Batch,
    t: TrainerConfig,
    layout: ParallelContext,
    *,
    meanwhile: Callable[[], None],
) -> tuple[dict[str, float], MicroBatchSize]:
    """Run forward, backward and AdamW for each mini-batch. Returns the metrics of result.json, and the size of this rank's largest micro-batch.
    Collective.

    meanwhile: Queues other work on the device, once, after the last gradients and before anything waits for them.

    Raises:
        NotFinite: names the metric. Raised before its mini-batch changes the adapter.
    """
    minibatches = split(batch, t.num_minibatches)
    microbatches = [_microbatches(batch, sequences, t, layout) for sequences in minibatches]
    batch = with_policies(model, batch, [micro for parts in microbatches for micro in parts], t, layout)
    done: list[tuple[Totals, float]] = []
    progress, sizes = Progress(), [MicroBatchSize(0, 0)]
    for sequences, parts in zip(minibatches, microbatches, strict=True):
        adam.zero_grad()
        totals = Totals()
        weights = token_weights(batch, sequences, t.loss)
        with lora.gradients_summed(model):
            for i, part in enumerate(parts):
                micro = collate(batch, part, weights, multiple=layout.token_multiple, device=layout.device)
                sizes.append(MicroBatchSize(micro.num_rows, len(micro.loss_tokens)))
                loss = backward_microbatch(
                    logits_of(model, micro),
                    micro,
                    totals,
                    t.loss,
                    temperature=batch.temperature,
                    group=layout.tp_group,
                    is_untrained=not done,
                )
                progress.tell(f"micro-batch {_place(len(done), i, microbatches)}  {micro.num_rows} tokens", loss)
        if len(done) + 1 == len(minibatches):
            meanwhile()
        progress.finish()
        totals.reduce(layout.device, layout.dp_group)
        optimizer.reduce_gradients(shards, layout)
        done.append((totals, optimizer.gradient_norm(shards, layout)))
        metrics = _metrics([done[-1]], t)
        refuse_not_finite(metrics)
        rate = optimizer.set_learning_rate(adam, t, optimizer.num_steps(adam))
        optimizer.clip_gradients(shards, metrics["train/grad_norm"], t.max_grad_norm)
        adam.step()
    return _metrics(done, t) | {"train/learning_rate": rate, "train/num_optimizer_steps": float(len(done))}, max(sizes, key=sum)


class Progress:
    """Logs each loss while the next micro-batch runs. So the GPU never waits for this process, and never runs far behind it."""

    def __init__(self) -> None:
        self.pending: tuple[str, Tensor, torch.cuda.Event | None] | None = None

    def tell(self, about: str, loss: Tensor) -> None:
        arrived = torch.cuda.Event() if loss.is_cuda else None  # type: ignore[no-untyped-call]  # torch
        on_host = loss.to("cpu", non_blocking=True)
        if arrived:
            arrived.record()
        self.finish()
        self.pending = (about, on_host, arrived)

    def finish(self) -> None:
        if self.pending is None:
            return
        (about, loss, arrived), self.pending = self.pending, None
        if arrived:
            arrived.synchronize()
        log.info("%s  loss %+.6f", about, loss.item())


def _metrics(done: list[tuple[Totals, float]], t: TrainerConfig) -> dict[str, float]:
    """Metrics of all mini-batches together. The gradient norm is their mean."""
    totals = functools.reduce(operator.add, (totals for totals, _ in done))
    figures = totals.metrics(has_reference=t.loss.kl.coefficient > 0, is_corrected=t.loss.correction.kind != "none")
    return figures | {"train/grad_norm": sum(norm for _, norm in done) / len(done)}


def refuse_not_finite(metrics: dict[str, float]) -> None:
    """Raises NotFinite for a metric that is nan or infinite; names it."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NotFinite(f"{name} is {value}; nothing was written")


def _microbatches(batch: Batch, sequences: list[int], t: TrainerConfig, layout: ParallelContext) -> list[list[int]]:
    """This data-parallel rank's micro-batches of a mini-batch. Ranks may have different numbers of them."""
    mine = pack(batch, spread(batch, sequences, layout.dp_size)[layout.dp_rank], t.microbatch_tokens)
    return mine + [[]] * (_longest_of_expert_peers(len(mine), layout) - len(mine))


def _place(minibatch: int, microbatch: int, microbatches: list[list[list[int]]]) -> str:
    """Position for the log, such as 3/8. With several mini-batches: 2/4 3/8."""
    place = f"{microbatch + 1}/{len(microbatches[minibatch])}"
    return place if len(microbatches) == 1 else f"{minibatch + 1}/{len(microbatches)} {place}"


def _longest_of_expert_peers(num_microbatches: int, layout: ParallelContext) -> int:
    """Largest number of micro-batches over the ranks that share experts. They exchange tokens in every layer, so all must run as many."""
    if layout.ep_size == 1:
        return num_microbatches
    most = torch.tensor(num_microbatches, device=layout.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
