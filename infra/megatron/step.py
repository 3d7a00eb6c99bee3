"""One optimizer step on one batch."""

import logging
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infra.config import TrainerConfig
from infra.megatron import optimizer
from infra.megatron.batch import Batch, MicroBatch, collate, pack, spread, token_weights
from infra.megatron.layout import Layout
from infra.megatron.lora import Shard
from infra.megatron.loss import Totals, backward_microbatch
from infra.megatron.model import logits_of

log = logging.getLogger(__name__)


class NotFinite(ArithmeticError):
    """A metric came out as NaN or infinite: this step must not be kept."""


def train_step(
    model: nn.Module, shards: list[Shard], adam: torch.optim.AdamW, batch: Batch, t: TrainerConfig, layout: Layout
) -> dict[str, float]:
    """Forward, backward, AdamW; returns the metrics of result.json. Collective.

    Raises:
        NotFinite: before the adapter is touched, naming the metric.
    """
    totals, progress = Totals(), Progress()
    for micro, place in _microbatches(batch, t, layout):
        loss = backward_microbatch(
            logits_of(model, micro), micro, totals, t, temperature=batch.temperature, group=layout.tp_group
        )
        progress.tell(f"micro-batch {place}  {micro.num_tokens} tokens", loss)
    progress.finish()
    totals.reduce(layout.device, layout.dp_group)
    optimizer.reduce_gradients(shards, layout)
    norm = optimizer.gradient_norm(shards, layout)
    metrics = totals.metrics() | {"train/grad_norm": norm, "train/learning_rate": t.learning_rate}
    refuse_not_finite(metrics)
    optimizer.clip_gradients(shards, norm, t.max_grad_norm)
    adam.step()
    return metrics


class Progress:
    """Logs each loss when the next micro-batch is under way, so that the GPU never waits for this process, nor runs far behind it."""

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


def refuse_not_finite(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise NotFinite(f"{name} is {value}; nothing was written")


def _microbatches(batch: Batch, t: TrainerConfig, layout: Layout) -> Iterator[tuple[MicroBatch, str]]:
    """This data-parallel rank's micro-batches, each with its place, such as 3/8. Ranks may have different numbers of them."""
    mine = pack(batch, spread(batch, layout.dp_size)[layout.dp_rank], t.max_tokens_per_microbatch)
    mine += [[]] * (_longest_of_expert_peers(len(mine), layout) - len(mine))
    weights = token_weights(batch, t.aggregation)
    for i, sequences in enumerate(mine):
        micro = collate(batch, sequences, weights, multiple=layout.token_multiple, device=layout.device)
        yield micro, f"{i + 1}/{len(mine)}"


def _longest_of_expert_peers(num_microbatches: int, layout: Layout) -> int:
    """Ranks that share experts exchange tokens in every layer: all must run as many micro-batches as the one with the most."""
    if layout.ep_size == 1:
        return num_microbatches
    most = torch.tensor(num_microbatches, device=layout.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
