"""Read batch.safetensors, check it, weight its tokens, spread it over data-parallel ranks and pack it into micro-batches.

Every rank reads the whole file: it is small, and so the loss's global denominators need no communication.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infra.config import LossConfig

# T tokens in all, S sequences; sequence s is [starts[s], starts[s + 1])

DTYPES = {
    "tokens": torch.int64,
    "cu_seqlens": torch.int64,
    "loss_mask": torch.uint8,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
}
OF_SEQUENCES = {"groups": torch.int64, "rewards": torch.float32}
"""Optional tensors. Without them each sequence is a group of its own, and rewards cannot be changed."""
LOGPROB_TOLERANCE = 1e-4
"""Nats by which the rounding of an engine's log-softmax may exceed zero."""


@dataclass(frozen=True)
class Batch:
    adapter_version: int
    adapter_sha256: str
    temperature: float
    tokens: Tensor
    starts: list[int]
    is_loss_token: Tensor
    """bool [T]"""
    rollout_logprobs: Tensor
    advantages: Tensor
    groups: list[int] | None = None
    """Group of each sequence; None: each sequence is a group of its own."""
    rewards: list[float] | None = None
    """Reward of each sequence, from which the advantages were computed."""
    advantage: str | None = None
    """How the advantages were computed; see infra.data.advantages."""
    old_logprobs: Tensor | None = None
    """The trainer's log-probs before its first optimizer step, at the tokens of this rank."""
    reference_logprobs: Tensor | None = None
    """The base model's log-probs, at the tokens of this rank."""

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    def span(self, sequence: int) -> slice:
        return slice(self.starts[sequence], self.starts[sequence + 1])

    def length(self, sequence: int) -> int:
        return self.starts[sequence + 1] - self.starts[sequence]

    def num_loss_tokens(self, sequence: int) -> int:
        return int(self.is_loss_token[self.span(sequence)].sum())


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences on the device. Position t of a sequence predicts its token t + 1. So targets and the tensors aligned with them
    are shifted, and the last position of each sequence has weight 0."""

    tokens: Tensor
    """int64 [1, T]. Padding at the end is a sequence of its own."""
    positions: Tensor
    starts: Tensor
    """int32 [S + 1], as in the file, but with the padding."""
    lengths: list[int]
    """Length of each sequence, with the padding."""
    targets: Tensor
    """int64 [T], like all tensors below."""
    is_loss: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    """Share of each target in the loss of the whole mini-batch, for any number of micro-batches and ranks."""
    num_tokens: int
    """Number of tokens without padding."""
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    @property
    def longest(self) -> int:
        return max(self.lengths)


def read_batch(path: Path) -> Batch:
    """Read a batch. Raises ValueError if the file's parts do not fit each other, or hold values that cannot have been sampled."""
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"batch {path} is no whole safetensors file: {error}") from error
    _check_shapes(path, tensors)
    try:
        version, digest, temperature = (
            int(metadata["adapter_version"]),
            metadata["adapter_sha256"],
            float(metadata["temperature"]),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"batch {path}: bad or missing metadata {error}; it says {metadata}") from error
    batch = Batch(
        adapter_version=version,
        adapter_sha256=digest,
        temperature=temperature,
        tokens=tensors["tokens"],
        starts=tensors["cu_seqlens"].tolist(),
        is_loss_token=tensors["loss_mask"].bool(),
        rollout_logprobs=tensors["rollout_logprobs"],
        advantages=tensors["advantages"],
        groups=tensors["groups"].tolist() if "groups" in tensors else None,
        rewards=tensors["rewards"].tolist() if "rewards" in tensors else None,
        advantage=metadata.get("advantage"),
    )
    _check_values(path, batch, tensors["loss_mask"])
    return batch


def _check_shapes(path: Path, tensors: dict[str, Tensor]) -> None:
    if missing := sorted(set(DTYPES) - set(tensors)):
        raise ValueError(f"batch {path} has no tensor {', '.join(missing)}")
    dtypes = DTYPES | {name: dtype for name, dtype in OF_SEQUENCES.items() if name in tensors}
    for name, dtype in dtypes.items():
        if tensors[name].dtype is not dtype or tensors[name].ndim != 1:
            raise ValueError(
                f"batch {path}: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, should be a vector of {dtype}"
            )
    lengths = {name: tensors[name].numel() for name in DTYPES if name != "cu_seqlens"}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"batch {path}: lengths disagree: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    starts = tensors["cu_seqlens"]
    if starts.numel() < 2 or starts[0] != 0 or starts[-1] != lengths["tokens"] or bool((starts.diff() < 1).any()):
        raise ValueError(
            f"batch {path}: lengths disagree: cu_seqlens must rise from 0 to {lengths['tokens']} tokens, is {_shown(starts)}"
        )
    for name in OF_SEQUENCES:
        if name in tensors and len(tensors[name]) != len(starts) - 1:
            raise ValueError(f"batch {path}: lengths disagree: {name} {len(tensors[name])} for {len(starts) - 1} sequences")


def _check_values(path: Path, batch: Batch, loss_mask: Tensor) -> None:
    if not 0 < batch.temperature < float("inf"):
        raise ValueError(f"batch {path}: temperature {batch.temperature} is not above 0")
    for name, values in (("rollout_logprobs", batch.rollout_logprobs), ("advantages", batch.advantages)):
        _refuse(path, batch, ~values.isfinite(), f"{name} {{}} is not finite", values)
    positive = batch.is_loss_token & (batch.rollout_logprobs > LOGPROB_TOLERANCE)
    _refuse(path, batch, positive, "rollout_logprobs {} is positive, no log-probability", batch.rollout_logprobs)
    _refuse(path, batch, loss_mask > 1, "loss_mask {} is neither 0 nor 1", loss_mask)
    firsts = torch.zeros_like(batch.is_loss_token)
    firsts[batch.starts[:-1]] = True
    _refuse(
        path,
        batch,
        firsts & batch.is_loss_token,
        "token {} is its sequence's first and in the loss: nothing predicts it",
        batch.tokens,
    )
    for s, reward in enumerate(batch.rewards or []):
        if not math.isfinite(reward):
            raise ValueError(f"batch {path}: rewards {reward} is not finite (sequence {s})")
    if not batch.is_loss_token.any():
        raise ValueError(f"batch {path}: loss_mask leaves no token to learn from")


def check_tokens(path: Path, batch: Batch, *, vocab_size: int, max_tokens_per_microbatch: int) -> None:
    """Raises ValueError for tokens outside the vocabulary, or sequences too long for a micro-batch."""
    outside = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    _refuse(path, batch, outside, f"token id {{}} is out of the vocabulary of {vocab_size}", batch.tokens)
    longest = max(range(batch.num_sequences), key=batch.length)
    if batch.length(longest) > max_tokens_per_microbatch:
        raise ValueError(
            f"batch {path}: sequence {longest} has {batch.length(longest)} tokens, "
            f"more than max_tokens_per_microbatch {max_tokens_per_microbatch}"
        )


def _refuse(path: Path, batch: Batch, is_bad: Tensor, message: str, values: Tensor) -> None:
    """Raises ValueError if there is a bad value; names the first one and its position."""
    if not is_bad.any():
        return
    where = int(is_bad.nonzero()[0])
    sequence = next(s for s in range(batch.num_sequences) if where < batch.starts[s + 1])
    place = f"sequence {sequence}, position {where - batch.starts[sequence]}"
    raise ValueError(f"batch {path}: {message.format(values[where].item())} ({place}; {int(is_bad.sum())} such)")


def _shown(values: Tensor) -> str:
    return str(values.tolist() if values.numel() <= 8 else [*values[:4].tolist(), "...", *values[-3:].tolist()])


def split(batch: Batch, num_minibatches: int) -> list[list[int]]:
    """Sequences of each mini-batch: whole groups in the order of the file. Numbers of groups differ by at most one.

    Sequences without loss tokens are left out, and so are empty mini-batches: with too few groups there are fewer mini-batches.
    """
    groups: dict[int, list[int]] = {}
    for sequence in range(batch.num_sequences):
        if batch.num_loss_tokens(sequence):
            groups.setdefault(batch.groups[sequence] if batch.groups else sequence, []).append(sequence)
    members, count = list(groups.values()), min(num_minibatches, len(groups))
    cuts = [i * len(members) // count for i in range(count + 1)]
    return [[s for group in members[start:end] for s in group] for start, end in pairwise(cuts)]


def token_weights(batch: Batch, sequences: list[int], c: LossConfig) -> Tensor:
    """float32 [T]: weight of each token in the loss of a mini-batch, whose sequences all have loss tokens; 0 at other tokens.

    token_mean: equal weights for all loss tokens, summing to 1. seq_mean_token_mean: equal weights for all sequences, split evenly among
    their tokens, summing to 1. seq_mean_token_sum_norm: 1 / (sequences x loss_scale_factor) for every loss token.
    """
    shares = torch.zeros(len(batch.tokens), dtype=torch.float64)
    counts = {s: batch.num_loss_tokens(s) for s in sequences}
    total = sum(counts.values())
    for s in sequences:
        match c.aggregation:
            case "token_mean":
                shares[batch.span(s)] = 1 / total
            case "seq_mean_token_mean":
                shares[batch.span(s)] = 1 / counts[s] / len(sequences)
            case "seq_mean_token_sum_norm":
                assert c.loss_scale_factor
                shares[batch.span(s)] = 1 / (len(sequences) * c.loss_scale_factor)
    return (shares * batch.is_loss_token).float()


def spread(batch: Batch, sequences: list[int], num_ranks: int) -> list[list[int]]:
    """Sequences of each data-parallel rank. The longest are assigned first, each to the rank with the fewest tokens."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for sequence in sorted(sequences, key=lambda s: (-batch.length(s), s)):
        lightest = load.index(min(load))
        ranks[lightest].append(sequence)
        load[lightest] += batch.length(sequence)
    return ranks


def pack(batch: Batch, sequences: list[int], max_tokens: int) -> list[list[int]]:
    """Pack sequences into micro-batches of at most max_tokens, first fit."""
    bins: list[list[int]] = []
    load: list[int] = []
    for sequence in sequences:
        size = batch.length(sequence)
        place = next((i for i, used in enumerate(load) if used + size <= max_tokens), None)
        if place is None:
            bins.append([sequence])
            load.append(size)
        else:
            bins[place].append(sequence)
            load[place] += size
    return bins


def collate(batch: Batch, sequences: list[int], weights: Tensor, *, multiple: int, device: torch.device) -> MicroBatch:
    """Make one micro-batch, padded to a multiple of tokens. Without sequences it is padding alone, which still takes part in
    the communication between ranks."""
    lengths = [batch.length(s) for s in sequences]
    num_tokens = sum(lengths)
    if padding := max(-num_tokens % multiple, 0 if sequences else multiple):
        lengths.append(padding)

    def packed(values: Tensor, *, shift: int) -> Tensor:
        parts = [values[batch.span(s)] for s in sequences]
        shifted = [torch.cat([part[shift:], part.new_zeros(shift)]) for part in parts]
        return _on(device, torch.cat([*shifted, values.new_zeros(padding)]))

    starts = _on(device, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    return MicroBatch(
        tokens=packed(batch.tokens, shift=0)[None],
        positions=_on(device, torch.cat([torch.arange(length) for length in lengths]))[None],
        starts=starts,
        lengths=lengths,
        targets=packed(batch.tokens, shift=1),
        is_loss=packed(batch.is_loss_token, shift=1),
        rollout_logprobs=packed(batch.rollout_logprobs, shift=1),
        advantages=packed(batch.advantages, shift=1),
        weights=packed(weights, shift=1),
        num_tokens=num_tokens,
        old_logprobs=None if batch.old_logprobs is None else packed(batch.old_logprobs, shift=1),
        reference_logprobs=None if batch.reference_logprobs is None else packed(batch.reference_logprobs, shift=1),
    )


def _on(device: torch.device, values: Tensor) -> Tensor:
    """Copy to the device, without waiting for its queued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
