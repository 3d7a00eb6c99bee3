"""Sequences that begin alike share rows, in any order."""

from itertools import accumulate

import numpy as np
import pytest

from infra.data.prefix_tree import PrefixTree, num_shared, sort_key

SEQUENCES = [
    np.array(tokens) for tokens in ([5, 6, 7, 1, 2], [5, 6, 7, 300], [5, 6, 7, 1], [5, 6, 7, 1, 3], [5, 6, 7, 1, 3], [9])
]


def test_a_common_prefix_is_found_by_tokens() -> None:
    assert [num_shared(SEQUENCES[0], other) for other in SEQUENCES] == [5, 3, 4, 4, 4, 0]
    assert num_shared(np.array([1]), np.arange(0)) == 0


def test_sequences_are_sorted_by_the_numbers_of_their_tokens() -> None:
    order = sorted(range(6), key=lambda i: sort_key(SEQUENCES[i]))
    assert [SEQUENCES[i].tolist() for i in order] == sorted(tokens.tolist() for tokens in SEQUENCES)


@pytest.mark.parametrize("seed", range(5))
def test_sorted_sequences_have_one_row_for_each_prefix_and_no_more(seed: int) -> None:
    generator = np.random.default_rng(seed)
    random = sorted((generator.integers(0, 3, generator.integers(0, 7)) for _ in range(30)), key=sort_key)
    tree = PrefixTree.of(random, [0] * 30)
    prefixes = {tuple(tokens[:end]) for tokens in random for end in range(1, len(tokens) + 1)}
    assert tree.num_rows == len(prefixes)
    prefix_of: dict[int, tuple[int, ...]] = {}
    for tokens, path in zip(random, tree.paths(), strict=True):
        for row, prefix in zip(path.tolist(), accumulate(((token,) for token in tokens.tolist()), tuple.__add__), strict=True):
            assert prefix_of.setdefault(row, prefix) == prefix
    assert sorted(prefix_of) == list(range(tree.num_rows))
    assert tree.num_attended == sum(len(prefix) - 0.5 for prefix in prefixes)


def test_in_another_order_rows_are_still_those_of_the_same_tokens() -> None:
    tree = PrefixTree.of(SEQUENCES, [0] * 6)
    assert tree.shared == [0, 3, 3, 4, 5, 0]
    assert [path.tolist() for path in tree.paths()] == [
        *([0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 6], [0, 1, 2, 6, 7], [0, 1, 2, 6, 7], [8])
    ]


def test_groups_share_nothing_with_each_other() -> None:
    tree = PrefixTree.of(SEQUENCES[:3], [1, 1, 2])
    assert tree.num_own == [5, 1, 4]


def test_no_sequences_have_no_rows() -> None:
    tree = PrefixTree.of([], [])
    assert (tree.num_rows, tree.num_attended, tree.paths()) == (0, 0, [])
