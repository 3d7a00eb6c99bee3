"""A mixture of experts that replaces megatron-core's: the same router, but all experts of a rank in a few large products.

router -> rows sorted by expert [-> to the ranks that hold them] -> experts [-> back] -> each token's rows added up

megatron-core needs Transformer Engine or a package of CUDA kernels for that. Without them it processes the experts one after the other.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, nn

from infra.config import LoraConfig
from infra.megatron.lora.products import GradientSums
from infra.megatron.model import kernels
from infra.megatron.model.experts import grouped_gemm
from infra.megatron.model.experts.grouped_gemm import Adapters, Route
from infra.megatron.model.parallel import ParallelContext
from infra.models import architecture

FIRST, SECOND = ("gate_proj", "up_proj"), ("down_proj",)
"""Hugging Face projections of an expert's two layers."""

# The index letters are those of grouped_gemm.py; P expert-parallel ranks, L experts of each


class MixtureOfExperts(nn.Module):
    """Replaces `mlp` in megatron-core's layer spec, hence the signatures of constructor and call."""

    def __init__(
        self, config: Any, shape: architecture.Experts, layout: ParallelContext, *, is_shared: bool = False
    ) -> None:  # Any: megatron-core has no types
        """is_shared: The experts' memory is not allocated here: see infra.megatron.checkpoint.shared_experts."""
        super().__init__()
        self.router = Router(config, shape)
        self.experts = GroupedExperts(config, shape, layout, is_shared=is_shared)

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """[T, 1, H] -> the same; under sequence parallelism this rank's tokens."""
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        return self.experts(x_TH, *self.router(x_TH)).view_as(hidden), None


class Router(nn.Module):
    """Router with logits in float32 for every model: a token that is routed differently changes more than rounding does."""

    def __init__(self, config: Any, shape: architecture.Experts) -> None:  # Any: megatron-core has no types
        super().__init__()
        self.per_token, self.renormalise = shape.per_token, shape.renormalise
        self.routes_TK: Tensor | None = None
        """Experts to send this rank's rows to, where they are not negative; None: it chooses."""
        self.weight = nn.Parameter(torch.empty(shape.count, config.hidden_size, dtype=config.params_dtype))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their shares, [T, K]."""
        logits_TE: Tensor = _RouterLogits.apply(x_TH, self.weight)  # type: ignore[no-untyped-call]  # torch
        if self.routes_TK is not None:
            return self._replayed(logits_TE, self.routes_TK)
        if self.renormalise:  # softmax over the chosen ones alone equals softmax over all, renormalised
            highest_TK, experts_TK = logits_TE.topk(self.per_token)
            return highest_TK.softmax(-1), experts_TK
        return logits_TE.softmax(-1).topk(self.per_token)

    def _replayed(self, logits_TE: Tensor, routes_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The shares, and their gradient, are those of the logits at the given experts."""
        experts_TK = torch.where(routes_TK < 0, logits_TE.topk(self.per_token).indices, routes_TK)
        scores_TE = logits_TE if self.renormalise else logits_TE.softmax(-1)
        share_TK = scores_TE.gather(1, experts_TK)
        return share_TK.softmax(-1) if self.renormalise else share_TK, experts_TK


class _RouterLogits(torch.autograd.Function):
    """x weight', in float32. Products of two bfloat16 numbers are exact in float32, in which a GPU adds them up: nothing has to be widened first."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.save_for_backward(weight_EH)
        if x_TH.is_cuda and x_TH.dtype is torch.bfloat16:
            return torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32)
        wide = kernels.wide(x_TH.dtype)
        return F.linear(x_TH.to(wide), weight_EH.to(wide))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight_EH,) = ctx.saved_tensors
        return gradients[0].to(weight_EH.dtype) @ weight_EH, None


def replay_routes(layers: Iterable[Any], routes: Tensor | None) -> None:  # Any: megatron-core has no types
    """Set the experts of the next forward pass, and of what is recomputed for its backward pass: [T, layers, K], of all rows. Sequence parallelism
    gives each rank its share of the rows, in order. None: each layer's router chooses.

    megatron-core's RouterReplay does this for a router of its own, which MixtureOfExperts replaces, and has no rows that are not replayed.
    """
    if routes is not None:
        routes = routes.chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]
    for number, layer in enumerate(layers):
        layer.mlp.router.routes_TK = None if routes is None else routes[:, number]


class GroupedExperts(nn.Module):
    """This rank's experts as stacked matrices, created directly on its device: they are nearly all of the model."""

    def __init__(
        self, config: Any, shape: architecture.Experts, layout: ParallelContext, *, is_shared: bool = False
    ) -> None:  # Any: megatron-core has no types
        super().__init__()
        self.count, self.num_ranks, self.group = shape.count, layout.ep_size, layout.ep_group
        held, options = shape.count // layout.ep_size, {"dtype": config.params_dtype, "device": layout.device}
        self.held = range(layout.ep_rank * held, (layout.ep_rank + 1) * held)
        sizes = (held, 2 * shape.ffn_size, config.hidden_size), (held, config.hidden_size, shape.ffn_size)
        self.gate_up, self.down = (nn.Parameter(torch.empty(0 if is_shared else size, **options)) for size in sizes)
        self.adapters: ExpertAdapters | None = None

    def forward(self, x_TH: Tensor, share_TK: Tensor, experts_TK: Tensor) -> Tensor:
        path = grouped_gemm.route(experts_TK, self.count)
        if self.num_ranks == 1:
            return self._compute(x_TH, share_TK, path)
        rows_NH: Tensor = _Gather.apply(x_TH, path.source_N, path.inverse_TK)  # type: ignore[no-untyped-call]  # torch
        share_N = share_TK.flatten().gather(0, path.order_N)
        sent, received, arrived = self._agree(path.ends_E)
        rows_MH, share_M = (exchange(values, sent, received, self.group) for values in (rows_NH, share_N))
        y_NH = exchange(self._compute(rows_MH, share_M, arrived), received, sent, self.group)
        combined: Tensor = _Combine.apply(y_NH, path.source_N, path.inverse_TK)  # type: ignore[no-untyped-call]  # torch
        return combined

    def _compute(self, x_TH: Tensor, share_TK: Tensor, path: Route) -> Tensor:
        adapters = self.adapters.fused(x_TH.dtype) if self.adapters and self.adapters.enabled else None
        share_N = share_TK.flatten().gather(0, path.order_N)
        return grouped_gemm.experts_output(x_TH, share_N, path, self.gate_up, self.down, adapters)

    def _agree(self, ends_E: Tensor) -> tuple[list[int], list[int], Route]:
        """Return how many rows are sent to and received from each rank, and how to sort the received ones. Waits for the device."""
        sent_PL = ends_E.diff(prepend=ends_E.new_zeros(1)).view(self.num_ranks, -1)
        received_PL = torch.empty_like(sent_PL)
        dist.all_to_all_single(received_PL, sent_PL.contiguous(), group=self.group)
        sent, received = torch.stack((sent_PL.sum(1), received_PL.sum(1))).tolist()
        # Received rows are ordered by rank, and within a rank by expert.
        experts_PL = torch.arange(len(self.held), device=ends_E.device).expand(self.num_ranks, -1)
        experts_M = experts_PL.flatten().repeat_interleave(received_PL.flatten(), output_size=sum(received))
        return sent, received, grouped_gemm.route(experts_M[:, None], len(self.held))


class ExpertAdapters(nn.Module):
    """LoRA of each expert, stacked: A [E, r, in] and B [E, out, r] by Hugging Face projection, float32."""

    def __init__(self, experts: GroupedExperts, lora: LoraConfig) -> None:
        super().__init__()
        self.enabled, self.rank, self.scale = True, lora.rank, lora.alpha / lora.rank
        self.ffn_size = experts.down.shape[2]
        # Asked when it is needed: tests widen a whole model. Not the module, which would make the experts a part of their adapters.
        self.base_dtype: Callable[[], torch.dtype] = lambda: experts.down.dtype
        num_experts, hidden, ffn = experts.down.shape
        sizes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        device = experts.down.device
        targets = [name for name in sizes if name in lora.target_modules]
        self.lora_A = nn.ParameterDict({x: torch.empty(num_experts, lora.rank, sizes[x][1], device=device) for x in targets})
        self.lora_B = nn.ParameterDict({x: torch.zeros(num_experts, sizes[x][0], lora.rank, device=device) for x in targets})
        self.adapted = [names for names in (FIRST, SECOND) if any(name in targets for name in names)]
        self.sums: tuple[GradientSums, ...] = ()

    def fused(self, dtype: torch.dtype) -> Adapters:
        """One A and one B for each of the two layers, in the type of the rows; like autocast."""
        if self.sums:
            pairs = [sums.used() for sums in self.sums]
        else:
            pairs = [(down.to(dtype), up.to(dtype)) for down, up in (self._pair(names) for names in self.adapted)]
        of = dict(zip(self.adapted, pairs, strict=True))
        return Adapters(of.get(FIRST), of.get(SECOND), self.scale)

    def begin_sums(self) -> None:
        """As LoraLinear's: one pair for each layer, until the end of an optimizer step's micro-batches."""
        self.sums = tuple(GradientSums(partial(self._pair, names), self.base_dtype()) for names in self.adapted)

    def _pair(self, projections: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Stack the A matrices; place each projection's B in its own block, in float32. Rows without an adapter are 0. The rank is padded for
        the kernels."""
        names = [name for name in projections if name in self.lora_A]
        down, width = torch.cat([self.lora_A[name] for name in names], 1), len(names) * self.rank
        blocks = []
        for name in projections:
            if name in names:
                before = names.index(name) * self.rank
                blocks.append(F.pad(self.lora_B[name], (before, width - before - self.rank)))
            else:
                blocks.append(down.new_zeros(len(down), self.ffn_size, width))
        missing = -width % grouped_gemm.ALIGNMENT
        return F.pad(down, (0, 0, 0, missing)), F.pad(torch.cat(blocks, 1), (0, missing))


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks, in order, and receive theirs. Collective, in the backward pass too.

    rows: [sum of sent, ...]. sent, received: numbers of rows to and from each rank. Returns [sum of received, ...].
    """
    arrived: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]  # torch
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group  # Any: torch types its context so
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    """Tokens -> rows. Avoids the scattered additions of indexing's own backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, source_N: Tensor, inverse_TK: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.save_for_backward(inverse_TK)
        return x_TH[source_N]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return grouped_gemm.combine(gradients[0], *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    """Rows -> tokens."""

    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, source_N: Tensor, inverse_TK: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.save_for_backward(source_N)
        return grouped_gemm.combine(y_NH, inverse_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (source_N,) = ctx.saved_tensors
        return gradients[0][source_N], None, None
