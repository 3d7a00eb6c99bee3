"""How sequences are spread and packed by what they share, and which row predicts which token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from infra.config import LossConfig
from infra.megatron.loss.batch import Batch, read_batch, split, token_weights
from infra.megatron.loss.microbatch import collate, cut, groups_of, pack, spread

USEFUL = [s for s in range(12) if s != 3]


@pytest.fixture
def batch(new_job: Callable[..., Any], make_batch: Callable[..., Any]) -> Batch:
    """Twelve sequences, of which number 3 teaches nothing."""
    tensors = make_batch(num_sequences=12)
    start, end = tensors["cu_seqlens"][3:5]
    tensors["loss_mask"][start:end] = 0
    return read_batch(new_job(batch=tensors).job.batch_path)


@pytest.fixture
def tree(new_job: Callable[..., Any], make_tree: Callable[..., Any]) -> Batch:
    return read_batch(new_job(batch=make_tree()).job.batch_path)


CPU = torch.device("cpu")


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 20])
def test_every_sequence_with_loss_tokens_goes_to_one_rank(num_ranks: int, batch: Batch) -> None:
    ranks = spread(batch, split(batch, 1)[0], num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(s for rank in ranks for s in rank) == USEFUL


def test_ranks_get_about_the_same_number_of_tokens(batch: Batch) -> None:
    loads = [sum(map(batch.length, rank)) for rank in spread(batch, USEFUL, 3)]
    assert max(loads) - min(loads) <= max(map(batch.length, range(12)))


def num_rows(batch: Batch, sequences: list[int]) -> int:
    return sum(batch.tree(group).num_rows for group in groups_of(batch, sequences))


def test_micro_batches_keep_to_their_size_and_lose_nothing(batch: Batch) -> None:
    sequences = spread(batch, USEFUL, 1)[0]
    packed = pack(batch, sequences, 50)
    assert sorted(s for micro in packed for s in micro) == sorted(sequences)
    assert max(num_rows(batch, micro) for micro in packed) <= 50
    assert len(packed) < len(sequences)


def test_a_budget_counts_what_a_group_has_in_common_once(tree: Batch) -> None:
    """Group 7: a prompt of 14 tokens, answers of 9, 15, 8 and 1, of which two begin with the same 3. Last tokens are not read."""
    group = [0, 1, 3, 4]
    size = 14 + 8 + 14 + 7 + 0 - 3
    assert num_rows(tree, group) == size
    assert [sorted(micro) for micro in pack(tree, group, size)] == [group]
    first, second = pack(tree, group, size - 1)
    assert sorted(first + second) == group
    assert num_rows(tree, first) + num_rows(tree, second) >= size + 14, "the prompt is computed in both"


def test_loss_tokens_count_where_there_are_more_of_them_than_rows(tree: Batch) -> None:
    """Group 2: one prompt token, the same 7 tokens twice, and 4 of them: 7 rows, but logits for 18 tokens."""
    assert num_rows(tree, [2, 5, 6]) == 7
    assert cut(tree, groups_of(tree, [2, 5, 6])[0], 18)[0].size == 18
    assert len(pack(tree, [2, 5, 6], 17)) == 2


def test_a_group_is_kept_on_one_rank_unless_ranks_would_be_idle(tree: Batch) -> None:
    several = replace(tree, groups=[s % 6 for s in range(12)])
    assert all(len(rank) % 2 == 0 for rank in spread(several, list(range(12)), 2))
    assert all(spread(tree, [0, 1, 3, 4], 2))


def test_each_loss_token_is_predicted_by_the_row_before_it(batch: Batch) -> None:
    weights = token_weights(batch, USEFUL, LossConfig())
    micro = collate(batch, [5, 1], weights, multiple=8, device=CPU)
    first, second = len(batch.inputs(5)), len(batch.inputs(1))
    assert first == batch.length(5) - 1, "its last token predicts nothing"
    assert micro.tokens.shape[1] % 8 == 0
    assert micro.keys is None
    assert micro.starts.tolist()[:3] == [0, first, first + second]
    assert micro.starts.equal(micro.key_starts)
    assert micro.starts[-1] == micro.tokens.shape[1]
    assert micro.positions[0, : first + second].tolist() == [*range(first), *range(second)]
    assert micro.loss_tokens.tolist() == [*batch.loss_tokens(5).tolist(), *batch.loss_tokens(1).tolist()]
    assert micro.lengths == [batch.num_loss_tokens(5), batch.num_loss_tokens(1)]
    assert micro.targets.equal(batch.tokens[micro.loss_tokens])
    assert micro.rollout_logprobs.equal(batch.rollout_logprobs[micro.loss_tokens])
    assert micro.tokens[0, micro.rows.source_N].equal(batch.tokens[micro.loss_tokens - 1])
    assert micro.weights.sum() == pytest.approx(float(weights[batch.span(5)].sum() + weights[batch.span(1)].sum()))
    assert micro.num_rows == first + second


def test_sequences_of_a_group_attend_to_the_rows_that_they_share(tree: Batch) -> None:
    sequences = pack(tree, split(tree, 1)[0], 10**6)[0]
    micro = collate(tree, sequences, torch.zeros(len(tree.tokens)), multiple=1, device=CPU)
    assert micro.keys is not None
    seen = iter(micro.tokens[0, micro.keys.source_N].split(micro.key_starts.diff().tolist()))
    positions = iter(micro.positions[0].split(micro.starts.diff().tolist()))
    adding = [s for s, count in zip(sequences, tree.tree(sequences).num_own, strict=True) if count]
    assert len(adding) < len(sequences)
    for s in adding:
        tokens = next(seen)
        assert tokens.tolist() == tree.inputs(s).tolist()
        own = next(positions)
        assert own.tolist() == list(range(len(tokens) - len(own), len(tokens)))
    assert micro.tokens[0, micro.rows.source_N].equal(tree.tokens[micro.loss_tokens - 1])
    assert micro.tokens.shape[1] == num_rows(tree, sequences) < sum(len(tree.inputs(s)) for s in sequences)


def test_a_micro_batch_without_sequences_is_padding_without_weight(batch: Batch) -> None:
    micro = collate(batch, [], token_weights(batch, USEFUL, LossConfig()), multiple=2, device=CPU)
    assert micro.tokens.shape == (1, 2)
    assert micro.weights.tolist() == micro.lengths == []
    assert micro.num_rows == 0


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_weights_of_all_micro_batches_sum_to_one(aggregation: Any, batch: Batch) -> None:
    weights = token_weights(batch, USEFUL, LossConfig(aggregation=aggregation))
    parts = [micro for rank in spread(batch, USEFUL, 3) for micro in pack(batch, rank, 60)]
    total = sum(float(collate(batch, micro, weights, multiple=1, device=CPU).weights.sum()) for micro in parts)
    assert total == pytest.approx(1, abs=1e-6)
