"""Read batch.safetensors, check it and weight its tokens. Every rank reads the whole file: it is small, and so the loss's global
denominators need no communication.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infra.config import LossConfig
from infra.data.prefix_tree import PrefixTree

# T tokens in all, S sequences; sequence s is [starts[s], starts[s + 1])

DTYPES = {
    "tokens": torch.int64,
    "cu_seqlens": torch.int64,
    "loss_mask": torch.uint8,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
}
OF_SEQUENCES = {"groups": torch.int64, "rewards": torch.float32, "episodes": torch.int64}
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
    episodes: list[int] | None = None
    """Episode of each sequence; None: each sequence is an episode of its own."""
    rewards: list[float] | None = None
    """Reward of each sequence, from which the advantages were computed."""
    routes: Tensor | None = None
    """uint8 or int16 [T, layers, K]: experts of each token, which the model's router does not choose then; undefined at each sequence's last
    token. None: it chooses."""
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
        return len(self.loss_tokens(sequence))

    def group(self, sequence: int) -> int:
        return self.groups[sequence] if self.groups else sequence

    def episode(self, sequence: int) -> int:
        return self.episodes[sequence] if self.episodes else sequence

    def loss_tokens(self, sequence: int) -> Tensor:
        """int64, rising: positions of its loss tokens in the tensors of the batch."""
        return self._loss_tokens[sequence]

    # Perf: all found once: 1 ms for 512 sequences of 1,024 tokens, and 3 ms if each is searched, for each caller (one CPU core).
    @cached_property
    def _loss_tokens(self) -> list[Tensor]:
        found = self.is_loss_token.nonzero()[:, 0]
        return list(found.tensor_split(torch.searchsorted(found, torch.tensor(self.starts[1:-1], dtype=torch.int64))))

    def inputs(self, sequence: int) -> np.ndarray:
        """Its tokens before its last loss token. The model reads no others: they would predict nothing."""
        return self._inputs[sequence]

    @cached_property
    def _inputs(self) -> list[np.ndarray]:
        ends = [int(places[-1]) if len(places) else start for places, start in zip(self._loss_tokens, self.starts, strict=False)]
        tokens = self.tokens.numpy()
        return [tokens[start:end] for start, end in zip(self.starts, ends, strict=False)]

    def tree(self, sequences: list[int]) -> PrefixTree:
        """Return what the sequences share, in this order."""
        return PrefixTree.of([self.inputs(s) for s in sequences], [self.group(s) for s in sequences])


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
        episodes=tensors["episodes"].tolist() if "episodes" in tensors else None,
        rewards=tensors["rewards"].tolist() if "rewards" in tensors else None,
        routes=tensors.get("routes"),
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
    if "routes" in tensors and len(tensors["routes"]) != lengths["tokens"]:
        raise ValueError(f"batch {path}: lengths disagree: routes {len(tensors['routes'])} for {lengths['tokens']} tokens")
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
            groups.setdefault(batch.group(sequence), []).append(sequence)
    members, count = list(groups.values()), min(num_minibatches, len(groups))
    cuts = [i * len(members) // count for i in range(count + 1)]
    return [[s for group in members[start:end] for s in group] for start, end in pairwise(cuts)]


def token_weights(batch: Batch, sequences: list[int], c: LossConfig) -> Tensor:
    """float32 [T]: weight of each token in the loss of a mini-batch, whose sequences all have loss tokens; 0 at other tokens.

    token_mean: equal weights for all loss tokens, summing to 1. seq_mean_token_mean: equal weights for all sequences, split evenly among
    their tokens, summing to 1. seq_mean_token_sum_norm: 1 / (sequences x loss_scale_factor) for every loss token. episode_mean_token_mean: as
    seq_mean_token_mean, with the sequences of an episode taken together.
    """
    shares = torch.zeros(len(batch.tokens), dtype=torch.float64)
    counts = {s: batch.num_loss_tokens(s) for s in sequences}
    total = sum(counts.values())
    of_episodes: Counter[int] = Counter()
    for s in sequences:
        of_episodes[batch.episode(s)] += counts[s]
    for s in sequences:
        match c.aggregation:
            case "token_mean":
                shares[batch.span(s)] = 1 / total
            case "seq_mean_token_mean":
                shares[batch.span(s)] = 1 / counts[s] / len(sequences)
            case "seq_mean_token_sum_norm":
                assert c.loss_scale_factor
                shares[batch.span(s)] = 1 / (len(sequences) * c.loss_scale_factor)
            case "episode_mean_token_mean":
                shares[batch.span(s)] = 1 / of_episodes[batch.episode(s)] / len(of_episodes)
    return (shares * batch.is_loss_token).float()
