"""Products with adapters, joined to the frozen ones or not, against plain autograd; and gradients summed over micro-batches."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infra.megatron.lora import products
from infra.megatron.lora.products import GradientSums, adapted_product

SHAPES = {
    "alike": (24, 32),
    "wide output": (16, 80),
    "wide input": (80, 16),
    "wide output, wider than a joined gradient": (1040, 2100),
}
NUM_ROWS, RANK = 50, 4


def tensors(into: int, out: int, dtype: torch.dtype) -> list[Tensor]:
    """x, down, up, weight, bias."""
    generator = torch.Generator().manual_seed(into)
    sizes = [(NUM_ROWS, 1, into), (RANK, into), (out, RANK), (out, into), (out,)]
    made = [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]
    made[1:] = [value / value.shape[-1] ** 0.5 for value in made[1:]]
    return [value.bfloat16().to(dtype) for value in made]


def plain(x: Tensor, down: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) + F.linear(F.linear(x, down), up)


def results(product: Callable[..., Tensor], values: list[Tensor], *, with_bias: bool, needs_x: bool = True) -> list[Tensor]:
    """The output, and the gradients of x, if it needs one, down and up."""
    leaves = [value.clone().requires_grad_() for value in values[:3]]
    leaves[0].requires_grad_(needs_x)
    output = product(*leaves, values[3], values[4] if with_bias else None)
    output.backward(torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view_as(output).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_plain_products(shape: str, with_bias: bool, needs_x: bool) -> None:
    values = tensors(*SHAPES[shape], torch.float64)
    found, expected = (results(p, values, with_bias=with_bias, needs_x=needs_x) for p in (adapted_product, plain))
    assert len(found) == (4 if needs_x else 3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", ["wide output", "wide input"])
def test_in_bfloat16_a_joined_product_is_no_further_from_exact_than_separate_ones(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = results(plain, tensors(*SHAPES[shape], torch.float64), with_bias=False)

    def far() -> list[float]:
        found = results(adapted_product, tensors(*SHAPES[shape], torch.bfloat16), with_bias=False)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    joined = far()
    monkeypatch.setattr(products, "WIDER", 1000)
    separate = far()
    print(f"{shape}, output and gradients of x, down, up: joined {joined}, separate {separate}")
    assert all(a <= 1.1 * b for a, b in zip(joined, separate, strict=True))
    assert min(a / b for a, b in zip(joined, separate, strict=True)) < 0.95, "one rounding less"


def test_the_sums_over_micro_batches_are_the_gradients_of_all_of_them() -> None:
    """In float32, of products in bfloat16: each micro-batch's gradient is rounded, their sum is not."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(8, 16, generator=generator).requires_grad_() for _ in range(3)]
    xs = [torch.randn(20, 16, generator=generator).bfloat16() for _ in range(5)]

    def pair() -> tuple[Tensor, Tensor]:
        return torch.cat(matrices[:2]), 2.0 * matrices[2]

    def use(down: Tensor, up: Tensor, x: Tensor) -> None:
        (F.linear(x, down).float().square().sum() + F.linear(x, up).float().sum()).backward()

    for x in xs:
        down, up = pair()
        use(down.bfloat16(), up.bfloat16(), x)
    expected = [matrix.grad for matrix in matrices]
    for matrix in matrices:
        matrix.grad = None
    sums = GradientSums(pair, torch.bfloat16)
    for x in xs:
        use(*sums.used(), x)
    assert all(matrix.grad is None for matrix in matrices), "not before they are handed on"
    sums.hand_on()
    torch.testing.assert_close([matrix.grad for matrix in matrices], expected, rtol=1e-6, atol=1e-6)
