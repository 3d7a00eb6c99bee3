"""batch.safetensors -> checked, weighted, spread over data-parallel ranks, packed into micro-batches.

Every rank reads the whole file: it is small, and so the loss's denominators are global without a message.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# T tokens in all, S sequences; sequence s is [starts[s], starts[s + 1])

DTYPES = {
    "tokens": torch.int64,
    "cu_seqlens": torch.int64,
    "loss_mask": torch.uint8,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
}
LOGPROB_TOLERANCE = 1e-4
"""An engine's log-softmax may round above zero by a little (nats)."""


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
    """Packed sequences on the device. Position t of a sequence predicts its token t + 1: targets and what belongs to them
    are shifted, and the last position of each sequence has weight 0."""

    tokens: Tensor
    """int64 [1, T], with padding at the end that is a sequence of its own"""
    positions: Tensor
    starts: Tensor
    """int32 [S + 1], as in the file but with the padding"""
    longest: int
    targets: Tensor
    """int64 [T], as all below"""
    is_loss: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    """Share of each target in the loss of the whole batch; they sum to 1 over all micro-batches of all ranks."""
    num_tokens: int
    """Without padding."""


def read_batch(path: Path) -> Batch:
    """Raises ValueError for a file whose parts do not fit each other, or that holds values nobody can have sampled."""
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
    )
    _check_values(path, batch, tensors["loss_mask"])
    return batch


def _check_shapes(path: Path, tensors: dict[str, Tensor]) -> None:
    if missing := sorted(set(DTYPES) - set(tensors)):
        raise ValueError(f"batch {path} has no tensor {', '.join(missing)}")
    for name, dtype in DTYPES.items():
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
    if not batch.is_loss_token.any():
        raise ValueError(f"batch {path}: loss_mask leaves no token to learn from")


def check_tokens(path: Path, batch: Batch, *, vocab_size: int, max_tokens_per_microbatch: int) -> None:
    """Raises ValueError for what this model, or these micro-batches, cannot take."""
    outside = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    _refuse(path, batch, outside, f"token id {{}} is out of the vocabulary of {vocab_size}", batch.tokens)
    longest = max(range(batch.num_sequences), key=batch.length)
    if batch.length(longest) > max_tokens_per_microbatch:
        raise ValueError(
            f"batch {path}: sequence {longest} has {batch.length(longest)} tokens, "
            f"more than max_tokens_per_microbatch {max_tokens_per_microbatch}"
        )


def _refuse(path: Path, batch: Batch, is_bad: Tensor, message: str, values: Tensor) -> None:
    """Name the first of the bad values and where it stands."""
    if not is_bad.any():
        return
    where = int(is_bad.nonzero()[0])
    sequence = next(s for s in range(batch.num_sequences) if where < batch.starts[s + 1])
    place = f"sequence {sequence}, position {where - batch.starts[sequence]}"
    raise ValueError(f"batch {path}: {message.format(values[where].item())} ({place}; {int(is_bad.sum())} such)")


def _shown(values: Tensor) -> str:
    return str(values.tolist() if values.numel() <= 8 else [*values[:4].tolist(), "...", *values[-3:].tolist()])


def token_weights(batch: Batch, aggregation: Literal["token_mean", "sequence_mean"]) -> Tensor:
    """float32 [T]: share of each token in the loss of the whole batch; 0 outside the loss, 1 in all.

    token_mean: every loss token the same. sequence_mean: every sequence with loss tokens the same, evenly among its own.
    """
    is_loss = batch.is_loss_token.double()
    if aggregation == "token_mean":
        return (is_loss / is_loss.sum()).float()
    counts = torch.tensor([batch.num_loss_tokens(s) for s in range(batch.num_sequences)], dtype=torch.float64)
    lengths = torch.tensor([batch.length(s) for s in range(batch.num_sequences)])
    per_token = (counts.clamp(min=1).reciprocal() / (counts > 0).sum()).repeat_interleave(lengths)
    return (is_loss * per_token).float()


def spread(batch: Batch, num_ranks: int) -> list[list[int]]:
    """Sequences of each data-parallel rank: the longest first, to whom has the fewest tokens; without those that teach nothing."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    useful = (s for s in range(batch.num_sequences) if batch.num_loss_tokens(s))
    for sequence in sorted(useful, key=lambda s: (-batch.length(s), s)):
        lightest = load.index(min(load))
        ranks[lightest].append(sequence)
        load[lightest] += batch.length(sequence)
    return ranks


def pack(batch: Batch, sequences: list[int], max_tokens: int) -> list[list[int]]:
    """Sequences -> micro-batches of at most max_tokens, first fit."""
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
    """One micro-batch, padded to a multiple of tokens; without sequences it is padding alone, which still takes part in
    the messages between ranks."""
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
        longest=max(lengths),
        targets=packed(batch.tokens, shift=1),
        is_loss=packed(batch.is_loss_token, shift=1),
        rollout_logprobs=packed(batch.rollout_logprobs, shift=1),
        advantages=packed(batch.advantages, shift=1),
        weights=packed(weights, shift=1),
        num_tokens=num_tokens,
    )


def _on(device: torch.device, values: Tensor) -> Tensor:
    """On the device, without waiting for what it is still busy with."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
