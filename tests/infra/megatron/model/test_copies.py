"""Copies of rows: their gradients are added in one order, and they are not kept for the backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from infra.megatron.model.copies import combine, copies_of, gather, saved_as_rows

SOURCE = torch.tensor([0, 1, 4, 0, 1, 2, 4, 0, 4, 4])
COPIES = copies_of(SOURCE, 6)


def test_copies_of_a_row_keep_their_order() -> None:
    assert [COPIES.order_N[a:b].tolist() for a, b in zip(COPIES.starts, COPIES.starts[1:], strict=False)] == [
        *([0, 3, 7], [1, 4], [5], [], [2, 6, 8, 9], [])
    ]


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_the_gradient_of_a_row_is_the_sum_of_its_copies(shape: tuple[int, ...]) -> None:
    rows = torch.randn(6, *shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(10, *shape, dtype=torch.float64)
    copied = gather(rows, COPIES)
    assert torch.equal(copied, rows[SOURCE])
    copied.backward(upstream)
    expected = torch.zeros(6, *shape, dtype=torch.float64).index_add_(0, SOURCE, upstream)
    torch.testing.assert_close(rows.grad, expected)


def test_bfloat16_copies_are_added_in_float32() -> None:
    many = copies_of(torch.zeros(257, dtype=torch.int64), 1)
    ones = torch.ones(257, 1, dtype=torch.bfloat16)
    ones[0] = 256  # to which bfloat16 cannot add 1
    assert combine(ones, many.order_N, many.starts).item() == 512


def test_without_copies_rows_have_no_gradient() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    gather(rows, copies_of(torch.arange(0), 3)).sum().backward()
    assert rows.grad is not None and rows.grad.equal(torch.zeros(3, 2))


class _Product(torch.autograd.Function):
    """Saves its inputs as they are, as the attention kernel does."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a


def test_rows_are_saved_in_place_of_their_copies_with_the_same_gradients() -> None:
    leaves = [torch.randn(6, 2, requires_grad=True), torch.randn(10, 2, requires_grad=True)]
    gradients = []
    for is_compact in (True, False):
        copied = gather(leaves[0], COPIES)
        if is_compact:
            with saved_as_rows(COPIES, (copied, leaves[0])):
                product = _Product.apply(copied, leaves[1])
            address = copied.data_ptr()
            assert not any(saved.data_ptr() == address for saved in product.grad_fn.saved_tensors)
            assert torch.equal(product.grad_fn.saved_tensors[0], copied)
        else:
            product = _Product.apply(copied, leaves[1])
        gradients.append(torch.autograd.grad(product.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
