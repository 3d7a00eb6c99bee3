"""Pack samples into the tensors of batch.safetensors."""

import json
from collections.abc import Sequence

import numpy as np
import safetensors.numpy

from infra.config import BatchConfig
from infra.data.turns.loss_masks import loss_masks
from infra.store import routes
from infra.store.samples import Logprobs, Sample, Tokens
from infra.trajectories.spans import turn_of_each


def packed(samples: Sequence[Sample], config: BatchConfig) -> dict[str, np.ndarray]:
    """The tensors of batch.safetensors; see infra.megatron.protocol.job for names, shapes and units."""
    lengths = [(len(sample.prompt_tokens), len(sample.output_tokens)) for sample in samples]
    is_output = np.repeat([[False, True]] * len(samples), np.ravel(lengths))

    def at_outputs(parts: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
        """0 at the prompts' tokens."""
        row = np.zeros(len(is_output), kind)
        row[is_output] = _joined(parts, kind)
        return row

    tensors = {
        "tokens": _joined([part for sample in samples for part in (sample.prompt_tokens, sample.output_tokens)], np.int64),
        "cu_seqlens": np.cumsum([0, *map(sum, lengths)], dtype=np.int64),
        "loss_mask": at_outputs(loss_masks(samples, config), np.uint8),
        "rollout_logprobs": at_outputs([np.asarray(sample.output_logprobs) for sample in samples], np.float32),
        "advantages": at_outputs([_advantages(sample) for sample in samples], np.float32),
        "groups": np.array([sample.prompt_id for sample in samples], np.int64),
        "rewards": np.array([sample.reward or 0.0 for sample in samples], np.float32),
    }
    return tensors | _episodes(samples) | _routes(samples)


def _advantages(sample: Sample) -> np.ndarray:
    """The advantage of each output token; 0 at given ones."""
    values = np.full(len(sample.output_tokens), sample.advantage or 0.0)
    if not sample.segments:
        return values
    if sample.turn_advantages is not None:
        values = np.asarray(sample.turn_advantages)[turn_of_each(sample.segments)[len(sample.prompt_tokens) :]]
    return np.where(sample.is_sampled, values, 0.0)


def _episodes(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the episode of each sample, if an episode has several branches."""
    if not any(sample.branch for sample in samples):
        return {}
    numbers: dict[tuple[int, int], int] = {}
    found = [numbers.setdefault(sample.episode, len(numbers)) for sample in samples]
    return {"episodes": np.array(found, np.int64)}


def _routes(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the experts of each token, if they were recorded; 0 at the last token of a sequence, which has none."""
    if not any(sample.routes for sample in samples):
        return {}
    rows = [routes.parsed(sample.routes or b"") for sample in samples]
    for sample, found in zip(samples, rows, strict=True):
        if len(found) != (wanted := len(sample.prompt_tokens) + len(sample.output_tokens) - 1):
            raise ValueError(
                f"routes of sample {sample.sample_index} of prompt {sample.prompt_id} have {len(found)} rows, its tokens have {wanted}"
            )
    return {
        "routes": np.concatenate([part for found in rows for part in (found, np.zeros_like(found, shape=(1, *found.shape[1:])))])
    }


def _joined(parts: Sequence[Tokens | Logprobs | np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.asarray(part, kind) for part in parts])


def serialized(tensors: dict[str, np.ndarray], about: dict[str, str]) -> bytes:
    """A safetensors file. Equal batches give equal bytes: safetensors alone writes its metadata in an order that changes."""
    data: bytes = safetensors.numpy.save(tensors, about)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, memoryview(data)[end:]])
