"""Texts with special tokens, as token ids.

Only a renderer puts special tokens into a conversation. The same characters inside a message are encoded as plain text, so that neither a
user nor a tool's result can end a turn or begin one.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

MAX_TOKENS = 1 << 31
"""More than any vocabulary has."""


class SpecialToken(NamedTuple):
    text: str


Piece = str | SpecialToken


class TokenText:
    """Encodes pieces of a conversation, and decodes answers."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: Of a model's folder, see infra.models.base_model.tokenizer.

        Raises:
            ValueError: for one that the library `tokenizers` does not run.
        """
        from tokenizers import Tokenizer

        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "its tokenizer is not one of the library `tokenizers`, by which alone conversations are extended exactly"
            )
        # A copy: the original goes on taking special tokens in texts for what they are.
        self._plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self._whole = tokenizer.backend_tokenizer

    def id_of(self, special: str) -> int:
        """Raises ValueError where the vocabulary does not have it."""
        if not (found := self.ids_of(special)):
            raise ValueError(f"its vocabulary has no {special}")
        return found[0]

    def ids_of(self, special: str) -> list[int]:
        """The token of a special text, or none where the vocabulary does not have it."""
        token: int | None = self._plain.token_to_id(special)
        return [] if token is None else [token]

    def ids(self, pieces: Iterable[Piece]) -> list[int]:
        return [token for group in self._groups(pieces) for token in group]

    def _groups(self, pieces: Iterable[Piece]) -> Iterator[list[int]]:
        for is_special, group in groupby(pieces, lambda piece: isinstance(piece, SpecialToken)):
            if is_special:
                yield [self.id_of(piece.text) for piece in group if isinstance(piece, SpecialToken)]
            else:  # neighbours are one text: a token may reach over their border
                text = "".join(piece for piece in group if isinstance(piece, str))
                yield list(self._plain.encode(text, add_special_tokens=False).ids)

    def unknown(self, tokens: Iterable[int]) -> int | None:
        """The first of these that is no token of the vocabulary; None: all are."""
        return next((token for token in tokens if token >= MAX_TOKENS or self._plain.id_to_token(token) is None), None)

    def raw_ids(self, text: str) -> list[int]:
        """Of a text that an agent rendered itself: special tokens in it are special tokens."""
        return list(self._whole.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text without special tokens."""
        return str(self._plain.decode(tokens, skip_special_tokens=True))

    def decode_all(self, tokens: list[int]) -> str:
        """The text with special tokens."""
        return str(self._plain.decode(tokens, skip_special_tokens=False))

    def special(self, token: int) -> str:
        """The text of a special token; empty for any other."""
        return "" if self.decode([token]) else self.decode_all([token])
