"""How much of an evaluation's text is in the training data, beyond whole texts that are equal."""

from collections.abc import Iterable, Iterator

NUM_WORDS = 13
"""Words in a row that count as a shared passage. Source: GPT-3 (arXiv 2005.14165), appendix C."""
Passage = tuple[str, ...]


def num_sharing_a_passage(trained: Iterable[str], asked: Iterable[str]) -> int:
    """Number of the trained texts that have 13 words in a row in common with an asked text. Case does not count."""
    known = {passage for text in asked for passage in _passages(text)}
    return sum(any(passage in known for passage in _passages(text)) for text in trained) if known else 0


def _passages(text: str) -> Iterator[Passage]:
    words = text.lower().split()
    return (tuple(words[begin : begin + NUM_WORDS]) for begin in range(len(words) - NUM_WORDS + 1))
