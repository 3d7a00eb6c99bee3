"""The product of a frozen linear layer with its adapters, and the sums of the adapters' gradients over micro-batches.

    output = x weight' + bias + (x down') up'

At small models memory traffic costs more than arithmetic: each product of width r reads or writes a whole activation. So the adapter's
matrices are joined to the frozen ones where that saves a pass over the wider of input and output.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# T rows, R ranks of all adapters of the layer

WIDER = 2
"""How many times wider one side of a layer is than the other, at least, where joining pays."""
NARROWEST = 1024
"""Inputs narrower than this get their gradient from a joined product too. Measured: 896 gains 17%, 3,584 loses 5% (docs/results/speed.md)."""
ALIGNMENT = 32
"""Rows are joined in multiples of this: 896 + 16 rows take 1.6 times as long as 896 + 32 on an H100."""


# Perf: for experts too, with norms of heads and the router's product: 30.0% -> 32.8% of the peak (12 layers of 30B-A3B, H200, docs/results/speed.md).
class GradientSums:
    """A pair of matrices in the layer's type, made once, and the sums of its gradients in the parameters' type."""

    def __init__(self, make: Callable[[], tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
        """make: Computes the pair from the parameters. It is called again at the end, so that nothing holds the unrounded pair meanwhile."""
        self.make = make
        with torch.no_grad():
            pair = make()
        self.rounded = [matrix.to(dtype, copy=True).requires_grad_() for matrix in pair]
        self.sums = [torch.zeros_like(matrix) for matrix in pair]

    def used(self) -> tuple[Tensor, Tensor]:
        """Return the pair, for one micro-batch, whose gradients are added to the sums."""
        down, up = (
            _Used.apply(rounded, total)  # type: ignore[no-untyped-call]  # torch
            for rounded, total in zip(self.rounded, self.sums, strict=True)
        )
        return down, up

    def hand_on(self) -> None:
        """Add the sums to the parameters' gradients: the graph of the pair, made once more, leads to them."""
        torch.autograd.backward(self.make(), self.sums)


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: Tensor, total: Tensor) -> Tensor:  # Any: torch types its context so
        ctx.total = total
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.total.add_(gradients[0])
        return None, None


# Perf: products of matrices 141.8 -> 112.5 ms a micro-batch of 32,768 tokens (0.5B, H100, docs/results/speed.md).
def adapted_product(x: Tensor, down: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] -> [..., out], for down [R, in], up [out, R] and a frozen weight [out, in] that no other rank has a part of."""
    product: Tensor = _AdaptedProduct.apply(x, down, up, weight, bias)  # type: ignore[no-untyped-call]  # torch
    return product


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:  # Any: torch types it so
        (out, into), rows = weight.shape, x.reshape(-1, x.shape[-1])
        if into >= WIDER * out:  # one pass over the input
            both = F.linear(rows, torch.cat((weight, F.pad(down, (0, 0, 0, -len(down) % ALIGNMENT)))))
            narrow = both[:, out : out + len(down)].contiguous()
            output = torch.addmm(both[:, :out], narrow, up.t())
            output = output if bias is None else output.add_(bias)
        elif out >= WIDER * into:  # one pass over the output
            narrow = F.linear(rows, down)
            output = F.linear(torch.cat((rows, narrow), 1), torch.cat((weight, up), 1), bias)
        else:
            narrow = F.linear(rows, down)
            output = F.linear(rows, weight, bias).addmm_(narrow, up.t())
        ctx.save_for_backward(x, narrow, down, up, weight)
        return output.view(*x.shape[:-1], out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x, narrow, down, up, weight = ctx.saved_tensors
        (out, into), gradient = weight.shape, gradients[0].reshape(-1, weight.shape[0])
        to_x = None
        if ctx.needs_input_grad[0] and out >= WIDER * into and into < NARROWEST:
            both = gradient @ torch.cat((weight, up), 1)
            to_narrow = both[:, into:].contiguous()
            to_x = torch.addmm(both[:, :into], to_narrow, down)
        else:
            to_narrow = gradient @ up
            if ctx.needs_input_grad[0] and into >= WIDER * out:
                to_x = torch.cat((gradient, to_narrow), 1) @ torch.cat((weight, down))
            elif ctx.needs_input_grad[0]:
                to_x = (gradient @ weight).addmm_(to_narrow, down)
        to_down, to_up = to_narrow.t() @ x.reshape(-1, into), gradient.t() @ narrow
        return None if to_x is None else to_x.view_as(x), to_down, to_up, None, None
