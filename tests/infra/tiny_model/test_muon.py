import torch
from torch import nn

from infra.tiny_model.muon import Muon, orthogonal


def test_singular_values_are_brought_near_one_and_their_directions_are_kept() -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 16, 40)
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    assert values.max() / values.min() > 3
    made = orthogonal(wide)
    inside = left.mT @ made @ right.mT
    diagonal = inside.diagonal(dim1=1, dim2=2)
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all()
    assert (inside - torch.diag_embed(diagonal)).abs().max() < 1e-3


def test_a_step_is_as_large_whatever_the_gradients_size_and_goes_against_it() -> None:
    """Tall, wide and square: the mean square of a step is (0.2 x learning rate) squared, as AdamW's is about."""
    torch.manual_seed(0)
    for shape in ((64, 16), (16, 64), (32, 32)):
        for scale in (1e-4, 1e4):
            weight = nn.Parameter(torch.zeros(shape))
            weight.grad = scale * torch.randn(shape)
            Muon([weight], lr=0.01).step()
            assert 0.7 < weight.square().mean().sqrt() / (0.2 * 0.01) < 1.3
            assert (weight * weight.grad).sum() < 0


def test_weights_of_one_shape_do_not_mix() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(2, 8, 8)
    together = [nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]
    for weight, gradient in zip(together, gradients, strict=True):
        weight.grad = gradient.clone()
    Muon(together, lr=0.1).step()
    for weight, gradient in zip(together, gradients, strict=True):
        alone = nn.Parameter(torch.zeros(8, 8))
        alone.grad = gradient.clone()
        Muon([alone], lr=0.1).step()
        assert torch.allclose(alone, weight, atol=1e-6)


def test_momentum_carries_a_gradient_into_later_steps() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = Muon([weight], lr=0.1)
    weight.grad = torch.eye(4)
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.zeros(4, 4)
    optimizer.step()
    assert (weight - before).diagonal().max() < -0.01
