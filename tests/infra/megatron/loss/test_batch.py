"""How a batch is split into mini-batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infra.megatron.loss.batch import Batch, read_batch, split

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
