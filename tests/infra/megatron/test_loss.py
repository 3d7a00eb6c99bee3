"""Log-probabilities against plain autograd, the policy loss against published and hand-made numbers."""

import math

import pytest
import torch
from torch import Tensor

from infra.megatron import loss
from infra.megatron.batch import Batch, token_weights
from infra.megatron.loss import Totals, policy_loss, token_logprobs
from infra.megatron.model import _plain_gradient


def batch_of(*masks: list[int]) -> Batch:
    """A batch with nothing but loss masks."""
    starts = torch.tensor([0, *map(len, masks)]).cumsum(0).tolist()
    is_loss = torch.tensor([bool(flag) for mask in masks for flag in mask])
    nothing = torch.zeros(len(is_loss))
    return Batch(0, "base", 1.0, torch.zeros(len(is_loss), dtype=torch.int64), starts, is_loss, nothing, nothing)


def random_logits() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (3 * torch.randn(17, 50)).requires_grad_(), torch.randint(0, 50, (17,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropies_and_gradients_are_those_of_plain_autograd(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "TOKENS_PER_CHUNK", 5)
    logits, targets = random_logits()
    upstream = torch.randn(17)
    found, entropies = token_logprobs(logits, targets, temperature=temperature, group=None)
    (gradient,) = torch.autograd.grad(found, logits, upstream)
    reference = (logits / temperature).log_softmax(-1)
    expected = reference.gather(1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=reference).entropy())


def test_logits_of_any_size_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    logprobs, entropies = token_logprobs(logits, torch.tensor([1]), temperature=1.0, group=None)
    assert logprobs.tolist() == [-1e4]
    assert entropies.tolist() == [0.0]


def test_bfloat16_logits_are_worked_on_in_float32() -> None:
    logits, targets = random_logits()
    rounded = logits.detach().bfloat16()
    found, _ = token_logprobs(rounded, targets, temperature=1.0, group=None)
    expected, _ = token_logprobs(rounded.float(), targets, temperature=1.0, group=None)
    assert torch.equal(found, expected)


def test_the_output_layer_gets_a_gradient_that_folds_into_one_matrix_product() -> None:
    logits, targets = random_logits()
    leaf = logits.detach()[:, None, :].requires_grad_()  # [T, 1, V], as Megatron's output layer gives them
    strides = []
    leaf.register_hook(lambda gradient: strides.append(gradient.stride()))
    seen, _ = _plain_gradient(torch.nn.Identity(), (), (leaf, None))
    logprobs, _ = token_logprobs(seen.transpose(0, 1).contiguous()[0], targets, temperature=1.0, group=None)
    logprobs.sum().backward()
    assert strides == [(50, 50, 1)]


def test_the_clipped_loss_of_nemo_rl() -> None:
    """NeMo-RL's tests/unit/algorithms/test_loss_functions.py: ratios 0.5, 1, 1.5."""
    log_ratios = torch.tensor([-1.69315, -1.0, -0.59453]) + 1
    total, clipped = policy_loss(log_ratios, torch.tensor([1.0, -1.0, 2.0]), torch.full((3,), 1 / 3), clip_low=0.2, clip_high=0.2)
    assert total.item() == pytest.approx(-0.6333, abs=1e-4)
    assert clipped.tolist() == [False, False, True]


def test_both_sides_of_the_clip_hold_only_against_the_advantage() -> None:
    log_ratios = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.25]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    total, clipped = policy_loss(log_ratios, advantages, torch.ones(5), clip_low=0.2, clip_high=0.28)
    assert clipped.tolist() == [False, True, True, False, False]
    assert total.item() == pytest.approx(-(0.5 - 0.8 + 1.28 - 2.0 + 1.25))


def test_a_huge_ratio_stays_finite() -> None:
    log_ratios = torch.tensor([500.0], requires_grad=True)
    total, _ = policy_loss(log_ratios, torch.tensor([-1.0]), torch.ones(1), clip_low=0.2, clip_high=0.2)
    total.backward()
    assert total.item() == pytest.approx(math.exp(20))
    assert log_ratios.grad is not None and log_ratios.grad.isfinite().all()


def test_token_mean_counts_every_loss_token_the_same() -> None:
    weights = token_weights(batch_of([0, 1, 1, 1], [0, 1], [0, 0]), "token_mean")
    assert weights.tolist() == [0, 0.25, 0.25, 0.25, 0, 0.25, 0, 0]


def test_sequence_mean_counts_every_sequence_the_same_and_leaves_out_masked_ones() -> None:
    weights = token_weights(batch_of([0, 1, 1, 0, 1, 1], [0, 1], [0, 0]), "sequence_mean")
    assert weights.tolist() == [0, 0.125, 0.125, 0, 0.125, 0.125, 0, 0.5, 0, 0]


def totals_of(log_ratios: list[float]) -> Totals:
    totals, d = Totals(), torch.tensor([*log_ratios, 99.0])
    is_loss = torch.tensor([True] * len(log_ratios) + [False])
    totals.add(torch.tensor(0.5), torch.ones_like(is_loss), torch.full_like(d, 2.0), d, is_loss)
    return totals


def test_mismatch_is_measured_on_loss_tokens_alone() -> None:
    d = [0.5, -1.0, 0.0]
    metrics = totals_of(d).metrics()
    ratios = [math.exp(x) for x in d]
    assert metrics["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.5)
    assert metrics["mismatch/max_abs_logprob_diff"] == 1.0
    assert metrics["mismatch/kl_k3"] == pytest.approx(sum(r - x - 1 for r, x in zip(ratios, d, strict=True)) / 3)
    assert metrics["mismatch/ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))
    assert (metrics["train/clip_frac"], metrics["train/entropy"]) == (1.0, 2.0)


@pytest.mark.parametrize(("log_ratios", "ess"), [([0.3, 0.3, 0.3], 1.0), ([30.0, 0.0, 0.0], 1 / 3)])
def test_effective_sample_size_tells_even_weights_from_one_that_rules(log_ratios: list[float], ess: float) -> None:
    assert totals_of(log_ratios).metrics()["mismatch/ess"] == pytest.approx(ess)


def test_nan_does_not_get_lost_in_the_maximum() -> None:
    totals = totals_of([math.nan])
    totals.add(torch.tensor(0.0), torch.tensor([False]), torch.zeros(1), torch.zeros(1), torch.tensor([True]))
    assert math.isnan(totals.metrics()["mismatch/max_abs_logprob_diff"])
