"""Metrics from sums."""

import math

import pytest
import torch

from infra.megatron.loss.metrics import Terms, Totals


def totals_of(log_ratios: list[float], *, mismatch: list[float] | None = None) -> Totals:
    """One micro-batch with a loss of 0.5, all tokens clipped, entropies 2."""
    totals, d = Totals(), torch.tensor(log_ratios)
    m = d if mismatch is None else torch.tensor(mismatch) if mismatch else None
    every = torch.ones_like(d, dtype=torch.bool)
    totals.add(torch.tensor(0.5), Terms(every, torch.full_like(d, 2.0), d, m, d, d + 1, every))
    return totals


def test_ratios_and_their_kl_are_means_over_loss_tokens() -> None:
    metrics = totals_of([0.5, -1.0]).metrics(has_reference=True, is_corrected=True)
    assert metrics["train/ratio_mean"] == pytest.approx((math.exp(0.5) + math.exp(-1)) / 2)
    assert metrics["train/ppo_kl"] == pytest.approx(0.25)
    assert metrics["train/kl_ref"] == pytest.approx(-0.25)
    assert metrics["mismatch/weight_mean"] == pytest.approx(0.75)
    assert metrics["mismatch/out_of_band_frac"] == 1.0


def test_what_was_not_asked_for_is_no_metric() -> None:
    assert not {"train/kl_ref", "mismatch/weight_mean", "mismatch/out_of_band_frac"} & set(totals_of([0.5]).metrics())


def test_mini_batches_average_their_losses_and_share_their_tokens() -> None:
    both = totals_of([1.0], mismatch=[0.25]) + totals_of([4.0, 4.0, 4.0], mismatch=[])
    metrics = both.metrics()
    assert metrics["train/loss"] == 0.5
    assert metrics["train/ppo_kl"] == pytest.approx(-13 / 4)
    assert metrics["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.25)


def test_a_micro_batch_without_loss_tokens_adds_nothing() -> None:
    totals = totals_of([0.5, -1.0])
    before = totals.metrics()
    totals.add(torch.tensor(0.0), Terms(*torch.zeros(4, 0)))
    assert totals.metrics() == before


def test_mismatch_is_measured_by_the_differences_of_log_probabilities() -> None:
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
    totals.add(torch.tensor(0.0), Terms(*torch.zeros(4, 1)))
    assert math.isnan(totals.metrics()["mismatch/max_abs_logprob_diff"])
