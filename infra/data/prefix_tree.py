"""Sequences that begin alike, as a tree of tokens: what they have in common is computed once.

A row is a token together with all tokens before it. Two sequences share a row if they agree in every token up to it. Sequences come in an
order, and each shares rows with the one before it. Sorted by their tokens, they share all that they can:

    prompt and answer      rows
    p q r   a b            0 1 2 3 4
    p q r   a c            0 1 2 3 5
    p q r   d              0 1 2 6
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


def sort_key(tokens: np.ndarray) -> bytes:
    """Return a key that sorts sequences of token ids by their tokens."""
    return tokens.astype(">u8").tobytes()


def num_shared(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(a), len(b))
    differences = np.flatnonzero(a[:size] != b[:size])
    return int(differences[0]) if len(differences) else size


@dataclass(frozen=True)
class PrefixTree:
    lengths: list[int]
    """Tokens of each sequence."""
    shared: list[int]
    """Number of first tokens of each sequence whose rows the sequence before it has too."""

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], groups: Sequence[int]) -> "PrefixTree":
        """Sequences share rows with sequences of the same group only."""
        neighbours = zip(pairwise(sequences), pairwise(groups), strict=True)
        shared = [num_shared(*both) if group == before else 0 for both, (before, group) in neighbours]
        return cls([len(tokens) for tokens in sequences], [0, *shared][: len(sequences)])

    @property
    def num_own(self) -> list[int]:
        """Rows that each sequence adds."""
        return [length - shared for length, shared in zip(self.lengths, self.shared, strict=True)]

    @property
    def num_rows(self) -> int:
        return sum(self.num_own)

    @property
    def num_attended(self) -> float:
        """Pairs of a row and a row that it attends to, the diagonal counted half."""
        return sum(length**2 - shared**2 for length, shared in zip(self.lengths, self.shared, strict=True)) / 2

    def paths(self) -> list[np.ndarray]:
        """Rows of each sequence. Rows are numbered in the order of the sequences."""
        paths, path, end = [], np.arange(0), 0
        for shared, own in zip(self.shared, self.num_own, strict=True):
            path = np.concatenate([path[:shared], np.arange(end, end + own)])
            paths.append(path)
            end += own
        return paths
