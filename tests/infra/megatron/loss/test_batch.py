"""How a batch is spread, packed and shifted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from infra.config import LossConfig
from infra.megatron.loss.batch import Batch, collate, pack, read_batch, split, spread, token_weights

USEFUL = [s for s in range(12) if s != 3]


@pytest.fixture
def batch(new_job: Callable[..., Any], make_batch: Callable[..., Any]) -> Batch:
    """Twelve sequences, of which number 3 teaches nothing."""
    tensors = make_batch(num_sequences=12)
    start, end = tensors["cu_seqlens"][3:5]
    tensors["loss_mask"][start:end] = 0
    return read_batch(new_job(batch=tensors).job.batch_path)


@pytest.mark.parametrize(
    ("num_minibatches", "expected"),
    [
        (1, [[0, 4, 1, 2, 8, 5, 6, 7, 9]]),
        (2, [[0, 4, 1, 2, 8], [5, 6, 7, 9]]),
        (3, [[0, 4], [1, 2, 8], [5, 6, 7, 9]]),
        (9, [[0, 4], [1, 2, 8], [5, 6], [7, 9]]),
    ],
)
def test_mini_batches_hold_whole_groups_in_the_order_of_the_file(
    num_minibatches: int, expected: list[list[int]], batch: Batch
) -> None:
    """Group 5 is sequence 3 alone, which teaches nothing, so that four groups are left."""
    grouped = replace(batch, groups=[8, 6, 6, 5, 8, 2, 2, 1, 6, 1])
    short = replace(grouped, starts=batch.starts[:11])
    assert split(short, num_minibatches) == expected


def test_without_groups_each_sequence_is_one(batch: Batch) -> None:
    assert split(batch, 11) == [[s] for s in USEFUL]


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 20])
def test_every_sequence_with_loss_tokens_goes_to_one_rank(num_ranks: int, batch: Batch) -> None:
    ranks = spread(batch, split(batch, 1)[0], num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(s for rank in ranks for s in rank) == USEFUL


def test_ranks_get_about_the_same_number_of_tokens(batch: Batch) -> None:
    loads = [sum(map(batch.length, rank)) for rank in spread(batch, USEFUL, 3)]
    assert max(loads) - min(loads) <= max(map(batch.length, range(12)))


def test_micro_batches_keep_to_their_size_and_lose_nothing(batch: Batch) -> None:
    sequences = spread(batch, USEFUL, 1)[0]
    packed = pack(batch, sequences, 50)
    assert sorted(s for micro in packed for s in micro) == sorted(sequences)
    assert max(sum(map(batch.length, micro)) for micro in packed) <= 50
    assert len(packed) < len(sequences)


def test_each_position_is_about_the_next_token_of_its_own_sequence(batch: Batch) -> None:
    weights = token_weights(batch, USEFUL, LossConfig())
    micro = collate(batch, [5, 1], weights, multiple=8, device=torch.device("cpu"))
    first, second = batch.span(5), batch.span(1)
    length, both = batch.length(5), batch.length(5) + batch.length(1)
    assert micro.tokens.shape[1] % 8 == 0
    assert micro.starts.tolist()[:3] == [0, length, both]
    assert micro.starts[-1] == micro.tokens.shape[1]
    assert micro.positions[0, :both].tolist() == [*range(length), *range(batch.length(1))]
    assert micro.targets[: length - 1].equal(batch.tokens[first][1:])
    assert micro.rollout_logprobs[length : both - 1].equal(batch.rollout_logprobs[second][1:])
    assert micro.weights[length - 1] == 0
    assert not micro.is_loss[both - 1 :].any()
    assert micro.weights.sum() == pytest.approx(float(weights[first].sum() + weights[second].sum()))
    assert micro.num_tokens == both


def test_a_micro_batch_without_sequences_is_padding_without_weight(batch: Batch) -> None:
    micro = collate(batch, [], token_weights(batch, USEFUL, LossConfig()), multiple=2, device=torch.device("cpu"))
    assert micro.tokens.shape == (1, 2)
    assert micro.weights.tolist() == [0, 0]
    assert micro.num_tokens == 0


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_weights_of_all_micro_batches_sum_to_one(aggregation: Any, batch: Batch) -> None:
    weights = token_weights(batch, USEFUL, LossConfig(aggregation=aggregation))
    parts = [micro for rank in spread(batch, USEFUL, 3) for micro in pack(batch, rank, 60)]
    total = sum(float(collate(batch, micro, weights, multiple=1, device=torch.device("cpu")).weights.sum()) for micro in parts)
    assert total == pytest.approx(1, abs=1e-6)
