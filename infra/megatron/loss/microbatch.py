"""Spread a mini-batch over data-parallel ranks, pack it into micro-batches, and make their tensors.

The sequences of a group are kept together, so that what they have in common is computed once (infra.data.prefix_tree). Sizes are numbers
of rows that are computed.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from infra.data.prefix_tree import num_shared, sort_key
from infra.megatron.loss.batch import Batch
from infra.megatron.model.copies import Copies, copies_of

# T rows, N loss tokens, S sequences


class Piece(NamedTuple):
    """Sequences of one group, in the order of their tokens."""

    sequences: list[int]
    size: int


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences on the device. A row is a token that the model reads; the row before a loss token predicts it."""

    tokens: Tensor
    """int64 [1, T]. Each sequence adds the rows that the one before it does not have. Padding at the end is a sequence of its own."""
    positions: Tensor
    """int64 [1, T], in the sequence."""
    starts: Tensor
    """int32: first own row of each sequence that has own rows, and the number of rows."""
    key_starts: Tensor
    """int32: the same in the rows that the sequences attend to."""
    longest: int
    """Largest number of own rows."""
    longest_keys: int
    """Largest number of rows that a sequence attends to."""
    keys: Copies | None
    """Rows that each sequence attends to: all its rows. None: no row is shared."""
    rows: Copies
    """Row before each loss token."""
    lengths: list[int]
    """Number of loss tokens of each sequence."""
    loss_tokens: Tensor
    """int64 [N] on the CPU: position of each loss token in the batch."""
    targets: Tensor
    """int64 [N]: the loss tokens, sequence by sequence; like all tensors below."""
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    """Share of each loss token in the loss of the whole mini-batch, for any number of micro-batches and ranks."""
    num_rows: int
    """Number of rows without padding."""
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    routes: Tensor | None = None
    """int16 [T, layers, K]: experts of each row; -1 at padding, for which the router chooses. A row that several sequences share has those of
    the first of them. None: the router chooses for all rows."""


def spread(batch: Batch, sequences: list[int], num_ranks: int) -> list[list[int]]:
    """Sequences of each data-parallel rank. The largest groups are assigned first, each to the rank with the fewest rows.

    A group above half of a rank's even share is cut, so that few groups occupy many ranks.
    """
    groups = groups_of(batch, sequences)
    whole = [piece for group in groups for piece in cut(batch, group, sys.maxsize)]
    most = max(1, sum(piece.size for piece in whole) // (2 * num_ranks))
    pieces = whole if num_ranks == 1 else [piece for group in groups for piece in cut(batch, group, most)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.sequences)):
        lightest = load.index(min(load))
        ranks[lightest] += piece.sequences
        load[lightest] += piece.size
    return ranks


def pack(batch: Batch, sequences: list[int], max_tokens: int) -> list[list[int]]:
    """Pack sequences into micro-batches of at most max_tokens rows, first fit. A group too large for a micro-batch is cut."""
    bins: list[list[int]] = []
    load: list[int] = []
    for piece in (piece for group in groups_of(batch, sequences) for piece in cut(batch, group, max_tokens)):
        place = next((i for i, used in enumerate(load) if used + piece.size <= max_tokens), None)
        if place is None:
            bins.append(piece.sequences)
            load.append(piece.size)
        else:
            bins[place] = bins[place] + piece.sequences
            load[place] += piece.size
    return bins


def groups_of(batch: Batch, sequences: Iterable[int]) -> list[list[int]]:
    """Sequences by group, in the order of the first of each. Those of a group are sorted by their tokens: so each shares all it can with
    the one before it."""
    groups: dict[int, list[int]] = {}
    for sequence in sequences:
        groups.setdefault(batch.group(sequence), []).append(sequence)
    return [sorted(group, key=lambda s: (sort_key(batch.inputs(s)), s)) for group in groups.values()]


def cut(batch: Batch, group: list[int], max_size: int) -> list[Piece]:
    """Cut a group into pieces of at most max_size rows, or of one sequence. What two pieces have in common is in both."""
    pieces: list[Piece] = []
    rows, losses, before = 0, 0, None
    for sequence in group:
        tokens, num_losses = batch.inputs(sequence), batch.num_loss_tokens(sequence)
        added = len(tokens) - (0 if before is None else num_shared(before, tokens))
        # Logits are not shared: sequences with the same answer have more loss tokens than rows.
        if pieces and max(rows + added, losses + num_losses) <= max_size:
            rows, losses = rows + added, losses + num_losses
            pieces[-1] = Piece([*pieces[-1].sequences, sequence], max(rows, losses))
        else:
            rows, losses = len(tokens), num_losses
            pieces.append(Piece([sequence], max(rows, losses)))
        before = tokens
    return pieces


def collate(batch: Batch, sequences: list[int], weights: Tensor, *, multiple: int, device: torch.device) -> MicroBatch:
    """Make one micro-batch, padded to a multiple of rows. Without sequences it is padding alone, which still takes part in
    the communication between ranks."""
    tree = batch.tree(sequences)
    num_rows = max(1, -(-tree.num_rows // multiple)) * multiple
    paths = [*map(torch.from_numpy, tree.paths()), torch.arange(tree.num_rows, num_rows)]
    begins, ends = [*tree.shared, 0], [*tree.lengths, num_rows - tree.num_rows]
    own = [end - begin for begin, end in zip(begins, ends, strict=True)]
    attending = [i for i, count in enumerate(own) if count]  # the beginning of another sequence has no rows of its own
    keys = torch.cat([paths[i] for i in attending])
    own_tokens = [slice(batch.starts[s] + tree.shared[i], batch.starts[s] + tree.lengths[i]) for i, s in enumerate(sequences)]
    tokens = [batch.tokens[span] for span in own_tokens]
    places = [batch.loss_tokens(s) for s in sequences]
    loss_tokens = torch.cat([torch.arange(0), *places])
    before = [path[place - batch.starts[s] - 1] for path, place, s in zip(paths, places, sequences, strict=False)]

    def at_loss_tokens(values: Tensor) -> Tensor:
        return _on(device, values[loss_tokens])

    return MicroBatch(
        tokens=_on(device, torch.cat([*tokens, torch.zeros(ends[-1], dtype=torch.int64)]))[None],
        positions=_on(device, torch.cat([torch.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]))[None],
        starts=_on(device, torch.tensor([0, *(own[i] for i in attending)]).cumsum(0).to(torch.int32)),
        key_starts=_on(device, torch.tensor([0, *(ends[i] for i in attending)]).cumsum(0).to(torch.int32)),
        longest=max(own),
        longest_keys=max(ends),
        # Perf: without shared rows the keys are used as they are.
        keys=None if len(keys) == num_rows else _copies_on(device, keys, num_rows),
        rows=_copies_on(device, torch.cat([torch.arange(0), *before]), num_rows),
        lengths=[len(place) for place in places],
        loss_tokens=loss_tokens,
        targets=at_loss_tokens(batch.tokens),
        rollout_logprobs=at_loss_tokens(batch.rollout_logprobs),
        advantages=at_loss_tokens(batch.advantages),
        weights=at_loss_tokens(weights),
        num_rows=tree.num_rows,
        old_logprobs=None if batch.old_logprobs is None else at_loss_tokens(batch.old_logprobs),
        reference_logprobs=None if batch.reference_logprobs is None else at_loss_tokens(batch.reference_logprobs),
        routes=None if batch.routes is None else _on(device, _routes_of(batch.routes, own_tokens, num_rows)),
    )


def _routes_of(routes: Tensor, own_tokens: list[slice], num_rows: int) -> Tensor:
    """Routes of the rows, which are the tokens of these slices and padding."""
    rows = torch.full((num_rows, *routes.shape[1:]), -1, dtype=torch.int16)
    end = 0
    for span in own_tokens:
        begin, end = end, end + span.stop - span.start
        rows[begin:end] = routes[span]
    return rows


def _copies_on(device: torch.device, source: Tensor, num_rows: int) -> Copies:
    return Copies(*(_on(device, values) for values in copies_of(source, num_rows)))


def _on(device: torch.device, values: Tensor) -> Tensor:
    """Copy to the device, without waiting for its queued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
