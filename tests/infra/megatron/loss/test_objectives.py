"""Losses, estimators and weights against published vectors (each with its source) and plain autograd."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.config import CorrectionConfig, LossConfig
from infra.megatron.loss.batch import Batch, token_weights
from infra.megatron.loss.logprobs import loss_of
from infra.megatron.loss.microbatch import MicroBatch
from infra.megatron.loss.objectives import cispo, correction_weights, gspo, kl_penalties, policy_losses, ppo, sum_over_sequence
from infra.megatron.model.copies import copies_of

# NeMo-RL's data for its clipped losses, tests/unit/algorithms/test_loss_functions.py at 7ea279a: ratios 0.5, 1, 1.5
NEMO_OLD = torch.tensor([-1.0, -1.0, -1.0])
NEMO_NEW = torch.tensor([-1.69315, -1.0, -0.59453])
NEMO_ENGINE = torch.tensor([-0.5, -1.5, -0.8])
NEMO_ADVANTAGES = torch.tensor([1.0, -1.0, 2.0])
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def micro_of(advantages: Tensor, rollout: Tensor, *lengths: int, **more: Tensor) -> MicroBatch:
    """Nothing but loss tokens, all of the same weight."""
    count = len(advantages)
    return MicroBatch(
        tokens=torch.zeros(1, count, dtype=torch.int64),
        positions=torch.zeros(1, count, dtype=torch.int64),
        starts=torch.tensor([0, count]).int(),
        key_starts=torch.tensor([0, count]).int(),
        longest=count,
        longest_keys=count,
        keys=None,
        rows=copies_of(torch.arange(count), count),
        lengths=list(lengths or [count]),
        loss_tokens=torch.arange(count),
        targets=torch.zeros(count, dtype=torch.int64),
        rollout_logprobs=rollout,
        advantages=advantages,
        weights=torch.full((count,), 1 / count),
        num_rows=count,
        **more,
    )


def nemo_loss(loss: LossConfig) -> float:
    """Of NeMo-RL's data in decoupled mode: the ratio is against the old policy, the weight is old against engine."""
    micro = micro_of(NEMO_ADVANTAGES, NEMO_ENGINE, old_logprobs=NEMO_OLD)
    return loss_of(micro, loss, NEMO_NEW, torch.zeros(3), is_untrained=False)[0].item()


def decoupled(**fields: Any) -> CorrectionConfig:
    return CorrectionConfig(mode="decoupled", **fields)


def test_ppo_clips_as_in_nemo_rl() -> None:
    """Source: NeMo-RL, tests/unit/algorithms/test_loss_functions.py at 7ea279a."""
    losses, is_clipped = ppo(NEMO_NEW - NEMO_OLD, NEMO_ADVANTAGES, **CLIP)
    assert losses.mean().item() == pytest.approx(-0.6333, abs=1e-4)
    assert is_clipped.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LossConfig(kind="ppo", **CLIP, correction=decoupled()), -0.6333),
        (LossConfig(kind="ppo", **CLIP, correction=decoupled(kind="tis", cap=0.8)), -0.4744),
        (LossConfig(kind="gspo", **CLIP, correction=decoupled()), -0.6057),
        (LossConfig(kind="gspo", **CLIP, correction=decoupled(kind="tis", cap=0.8, level="sequence")), -0.4846),
    ],
)
def test_corrected_losses_are_those_of_nemo_rl(loss: LossConfig, expected: float) -> None:
    """Source: NeMo-RL, tests/unit/algorithms/test_loss_functions.py:1330 and :1832 at 7ea279a; -0.4846 is GSPO with one weight a sequence."""
    assert nemo_loss(loss) == pytest.approx(expected, abs=1e-4)


def test_dual_clip_bounds_the_loss_of_a_bad_token_as_in_nemo_rl() -> None:
    """Source: NeMo-RL, tests/unit/algorithms/test_loss_functions.py:1677 at 7ea279a: (-.5 + 1 + 12) / 3."""
    log_ratios, advantages = torch.tensor([0.5, 1.0, 10.0]).log(), torch.tensor([1.0, -1.0, -4.0])
    losses, is_clipped = ppo(log_ratios, advantages, **CLIP, dual_clip=3.0)
    assert losses.mean().item() == pytest.approx(4.1667, abs=1e-4)
    assert is_clipped.tolist() == [False, False, True]


def test_dual_clip_is_that_of_slime() -> None:
    """Source: slime, tests/test_policy_loss.py at 624b824: ratios 2, 2, 0.5, clip 0.2, c 1.5."""
    losses, _ = ppo(torch.tensor([2.0, 2.0, 0.5]).log(), torch.tensor([2.0, -2.0, 2.0]), **CLIP, dual_clip=1.5)
    assert losses.tolist() == pytest.approx([-2.4, 3.0, -1.0])


def test_a_token_that_the_dual_clip_holds_has_no_gradient() -> None:
    log_ratios = torch.tensor([10.0, 2.0]).log().requires_grad_()
    ppo(log_ratios, torch.tensor([-1.0, -1.0]), **CLIP, dual_clip=3.0)[0].sum().backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == pytest.approx([0.0, 2.0])


def test_both_sides_of_the_clip_hold_only_against_the_advantage() -> None:
    log_ratios = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.25]).log()
    losses, is_clipped = ppo(log_ratios, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), clip_low=0.2, clip_high=0.28)
    assert is_clipped.tolist() == [False, True, True, False, False]
    assert losses.tolist() == pytest.approx([-0.5, 0.8, -1.28, 2.0, -1.25])


def test_a_huge_ratio_stays_finite() -> None:
    log_ratios = torch.tensor([500.0], requires_grad=True)
    losses, _ = ppo(log_ratios, torch.tensor([-1.0]), **CLIP)
    losses.sum().backward()
    assert losses.item() == pytest.approx(math.exp(20))
    assert log_ratios.grad is not None and log_ratios.grad.isfinite().all()


def test_gspo_gives_all_tokens_of_a_sequence_the_geometric_mean_of_their_ratios() -> None:
    log_ratios, advantages = torch.tensor([0.1, -0.3, 0.5, 0.0]), torch.tensor([1.0, 1.0, -2.0, -2.0])
    losses, is_clipped = gspo(log_ratios, advantages, [2, 2], clip_low=0.2, clip_high=0.2)
    first, second = math.exp(-0.1), math.exp(0.25)
    assert losses.tolist() == pytest.approx([-first, -first, 2 * second, 2 * second])
    assert not is_clipped.any(), "beyond the clip, but against the advantage"


def test_gspo_s_gradient_is_that_of_the_sequence_s_ratio() -> None:
    """With the mean over tokens, token by token and sequence by sequence are the same objective (arXiv 2507.18071, eq. 5 and 14)."""
    values = torch.tensor([0.1, -0.2, 0.05, 0.3])
    by_token, by_sequence = values.clone().requires_grad_(), values.clone().requires_grad_()
    advantages = torch.full((4,), -1.5)
    gspo(by_token, advantages, [4], **CLIP)[0].mean().backward()
    (1.5 * by_sequence.mean().exp()).backward()
    torch.testing.assert_close(by_token.grad, by_sequence.grad)


def test_cispo_is_that_of_slime() -> None:
    """Source: slime, tests/test_cispo_loss.py at 624b824: loss -clip(r) A log pi, gradient -clip(r) A at every token."""
    advantages, logprobs = torch.tensor([1.0, -0.5, 2.0, -1.0]), torch.tensor([-0.7, -1.2, -0.4, -2.1], requires_grad=True)
    ratios = torch.tensor([0.5, 1.1, 1.9, 1.0])
    losses, is_clipped = cispo(logprobs, ratios.log(), advantages, clip_low=0.2, clip_high=0.28)
    clipped = torch.tensor([0.8, 1.1, 1.28, 1.0])
    losses.sum().backward()
    torch.testing.assert_close(losses, -clipped * advantages * logprobs)
    torch.testing.assert_close(logprobs.grad, -clipped * advantages)
    assert is_clipped.tolist() == [True, False, True, False]


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_where_policies_agree_every_loss_has_reinforce_s_gradient(kind: Any) -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.tensor([1.0, 1.0, -3.0])
    log_ratios = logprobs - logprobs.detach()
    losses, is_clipped = policy_losses(LossConfig(kind=kind), logprobs, log_ratios, advantages, [2, 1])
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert not is_clipped.any()


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [-1, 14, 29]), ("k2", [0.5, 98, 420.5]), ("k3", [math.e - 2, 10, 10])]
)
def test_kl_estimators_are_those_of_nemo_rl(estimator: Any, expected: list[float]) -> None:
    """Source: NeMo-RL, test_calculate_kl of tests/unit/algorithms/test_loss_functions.py at 7ea279a; k3 (13 and 28) held at 10."""
    found = kl_penalties(estimator, torch.full((3,), -1.0), torch.tensor([0.0, -15.0, -30.0]))
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_gradients_of_the_kl_estimators() -> None:
    d = torch.tensor([0.3, -0.7])
    for estimator, expected in (("k1", torch.ones(2)), ("k2", d), ("k3", 1 - (-d).exp())):
        logprobs = d.clone().requires_grad_()
        kl_penalties(estimator, logprobs, torch.zeros(2)).sum().backward()  # type: ignore[arg-type]
        torch.testing.assert_close(logprobs.grad, expected)


def test_icepop_is_that_of_nemo_rl() -> None:
    """Source: NeMo-RL, tests/unit/algorithms/test_loss_functions.py:1464 at 7ea279a: weights .6065, 12.182, .8187, band [0.5, 5]."""
    log_ratios = NEMO_OLD - torch.tensor([-0.5, -3.5, -0.8])
    weights, is_outside = correction_weights(decoupled(kind="icepop", floor=0.5, cap=5.0), log_ratios, [3])
    assert weights.tolist() == pytest.approx([0.6065, 0, 0.8187], abs=1e-4)
    assert is_outside.tolist() == [False, True, False]


def test_icepop_is_that_of_verl() -> None:
    """Source: verl, test_exact_icepop_zeroes_weights_without_changing_mask of tests/trainer/ppo/test_rollout_corr.py at 1dda039."""
    weights, is_outside = correction_weights(
        decoupled(kind="icepop", floor=0.5, cap=5.0), torch.tensor([0.4, 0.8, 6.0]).log(), [3]
    )
    assert weights.tolist() == pytest.approx([0, 0.8, 0])
    assert is_outside.float().mean().item() == pytest.approx(2 / 3)
    assert weights.std(correction=0).item() == pytest.approx(0.3771236, abs=1e-6)
    assert (weights.sum() ** 2 / (3 * weights.square().sum())).item() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"kind": "none"}, [1, 1, 1, 1]),
        ({"kind": "tis", "cap": 2.0}, [math.exp(-1), math.exp(0.5), 2, math.exp(-0.1)]),
        ({"kind": "mis", "cap": 2.0}, [math.exp(-1), math.exp(0.5), 0, math.exp(-0.1)]),
        ({"kind": "icepop", "cap": 2.0}, [0, math.exp(0.5), 0, math.exp(-0.1)]),
        ({"kind": "tis", "cap": 2.0, "level": "sequence"}, [math.exp(-0.5)] * 2 + [2, 2]),
        ({"kind": "mis", "cap": 2.0, "level": "sequence"}, [math.exp(-0.5)] * 2 + [0, 0]),
        ({"kind": "icepop", "cap": 2.0, "floor": 0.7, "level": "sequence"}, [0, 0, 0, 0]),
    ],
)
def test_each_correction_at_both_levels(correction: dict[str, Any], expected: list[float]) -> None:
    """Weights .368 and 1.649 are verl's, test_mask_mode of tests/trainer/ppo/test_rollout_corr.py at 1dda039."""
    log_ratios = torch.tensor([-1.0, 0.5, 1.5, -0.1])
    weights, is_outside = correction_weights(decoupled(**correction), log_ratios, [2, 2])
    assert weights.tolist() == pytest.approx(expected)
    untouched = log_ratios if correction.get("level") != "sequence" else sum_over_sequence(log_ratios, [2, 2])
    if correction["kind"] != "none":
        assert is_outside.tolist() == [
            w != pytest.approx(x) for w, x in zip(weights.tolist(), untouched.exp().tolist(), strict=True)
        ]


def test_a_correction_weight_carries_no_gradient_and_an_endless_one_stays_finite() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    micro = micro_of(torch.tensor([1.0, 1.0]), torch.tensor([-1.5, -90.0]))
    total, terms = loss_of(micro, LossConfig(correction=decoupled(kind="tis")), logprobs, torch.zeros(2), is_untrained=True)
    total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.5) / 2, -1.0])
    assert terms.is_outside_T is not None and terms.is_outside_T.tolist() == [False, True]


def test_without_an_optimizer_step_in_between_the_decoupled_ratio_is_one() -> None:
    micro = micro_of(NEMO_ADVANTAGES, NEMO_ENGINE)
    total, terms = loss_of(micro, LossConfig(correction=decoupled()), NEMO_NEW, torch.zeros(3), is_untrained=True)
    assert terms.log_ratios_T.tolist() == [0, 0, 0]
    assert terms.mismatch_T is not None and terms.mismatch_T.equal(NEMO_NEW - NEMO_ENGINE)
    assert total.item() == pytest.approx(-2 / 3)


def test_bypass_ratios_are_against_the_engine_and_mismatch_is_seen_before_the_first_step_only() -> None:
    micro = micro_of(NEMO_ADVANTAGES, NEMO_ENGINE, old_logprobs=NEMO_OLD)
    _, first = loss_of(micro, LossConfig(), NEMO_NEW, torch.zeros(3), is_untrained=True)
    _, later = loss_of(micro, LossConfig(), NEMO_NEW, torch.zeros(3), is_untrained=False)
    assert first.log_ratios_T.equal(NEMO_NEW - NEMO_ENGINE)
    assert first.mismatch_T is not None and first.mismatch_T.equal(NEMO_NEW - NEMO_ENGINE)
    assert later.mismatch_T is None


def test_penalty_and_bonus_are_added_with_the_same_weights() -> None:
    reference, entropies = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, 2.0, 6.0])
    micro = micro_of(NEMO_ADVANTAGES, NEMO_ENGINE, reference_logprobs=reference)

    def total(**fields: Any) -> float:
        return loss_of(micro, LossConfig(**fields), NEMO_NEW, entropies, is_untrained=True)[0].item()

    k2 = float((0.5 * (NEMO_NEW - reference).square()).mean())
    assert total(kl={"coefficient": 0.1, "estimator": "k2"}) - total() == pytest.approx(0.1 * k2, abs=1e-6)
    assert total(entropy_bonus=0.01) - total() == pytest.approx(-0.03, abs=1e-6)
    assert total(kl={"coefficient": 0.1, "where": "reward"}) == total(), "the advantages have it already"


def batch_of(*masks: list[int]) -> Batch:
    """A batch with nothing but loss masks."""
    is_loss = torch.tensor([bool(flag) for mask in masks for flag in mask])
    nothing = torch.zeros(len(is_loss))
    places = torch.tensor([0, *map(len, masks)]).cumsum(0).tolist()
    return Batch(0, "base", 1.0, torch.zeros(len(is_loss), dtype=torch.int64), places, is_loss, nothing, nothing)


def test_token_mean_counts_every_loss_token_the_same() -> None:
    weights = token_weights(batch_of([0, 1, 1, 1], [0, 1], [0, 0]), [0, 1], LossConfig())
    assert weights.tolist() == [0, 0.25, 0.25, 0.25, 0, 0.25, 0, 0]


def test_seq_mean_token_mean_counts_every_sequence_the_same_and_leaves_out_masked_ones() -> None:
    weights = token_weights(batch_of([0, 1, 1, 0, 1, 1], [0, 1], [0, 0]), [0, 1], LossConfig(aggregation="seq_mean_token_mean"))
    assert weights.tolist() == [0, 0.125, 0.125, 0, 0.125, 0.125, 0, 0.5, 0, 0]


def test_sums_over_masked_tokens_are_those_of_verl() -> None:
    """Source: verl, tests/trainer/ppo/test_loss_aggregation_on_cpu.py at 1dda039: the masked sum is 13."""
    losses, batch = torch.tensor([1.0, 2, 30, 4, 50, 6]), batch_of([1, 1, 0], [1, 0, 1])

    def aggregated(**fields: Any) -> float:
        return float((losses * token_weights(batch, [0, 1], LossConfig(**fields))).sum())

    assert aggregated(aggregation="seq_mean_token_sum_norm", loss_scale_factor=5) == pytest.approx(13 / 2 / 5)
    assert aggregated() == pytest.approx(13 / 4)
    assert aggregated(aggregation="seq_mean_token_mean") == pytest.approx((1.5 + 5) / 2)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_denominators_are_those_of_the_mini_batch_alone(aggregation: Any, make_batch: Callable[..., Any]) -> None:
    c = LossConfig(aggregation=aggregation, loss_scale_factor=40 if aggregation == "seq_mean_token_sum_norm" else None)
    batch = batch_of([0, 1, 1, 1], [0, 1], [0, 1, 1])
    assert token_weights(batch, [1, 2], c)[4:].equal(token_weights(batch_of([0, 1], [0, 1, 1]), [0, 1], c))
    assert not token_weights(batch, [1, 2], c)[:4].any()
