"""Pack samples into the tensors of batch.safetensors."""

import json
from collections.abc import Sequence

import numpy as np
import safetensors.numpy

from infra.config import BatchConfig
from infra.store.samples import Logprobs, Sample, Tokens


def num_loss_tokens(sample: Sample, config: BatchConfig) -> int:
    return 0 if config.mask_truncated and sample.finish_reason == "length" else len(sample.output_tokens)


def packed(samples: Sequence[Sample], config: BatchConfig) -> dict[str, np.ndarray]:
    """The tensors of batch.safetensors; see infra.megatron.protocol.job for names, shapes and units."""
    lengths = [(len(sample.prompt_tokens), len(sample.output_tokens)) for sample in samples]
    spoken = [num for _, num in lengths]
    is_spoken = np.repeat([[False, True]] * len(samples), np.ravel(lengths))

    def at_outputs(values: np.ndarray) -> np.ndarray:
        """0 at the prompts' tokens."""
        row = np.zeros(len(is_spoken), values.dtype)
        row[is_spoken] = values
        return row

    counts = np.array([num_loss_tokens(sample, config) > 0 for sample in samples], np.uint8)
    advantage = np.array([sample.advantage or 0.0 for sample in samples], np.float32)
    return {
        "tokens": _joined([part for sample in samples for part in (sample.prompt_tokens, sample.output_tokens)], np.int64),
        "cu_seqlens": np.cumsum([0, *map(sum, lengths)], dtype=np.int64),
        "loss_mask": at_outputs(np.repeat(counts, spoken)),
        "rollout_logprobs": at_outputs(_joined([sample.output_logprobs for sample in samples], np.float32)),
        "advantages": at_outputs(np.repeat(advantage, spoken)),
        "groups": np.array([sample.prompt_id for sample in samples], np.int64),
        "rewards": np.array([sample.reward or 0.0 for sample in samples], np.float32),
    }


def _joined(parts: Sequence[Tokens | Logprobs], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.asarray(part, kind) for part in parts])


def serialized(tensors: dict[str, np.ndarray], about: dict[str, str]) -> bytes:
    """A safetensors file. Equal batches give equal bytes: safetensors alone writes its metadata in an order that changes."""
    data: bytes = safetensors.numpy.save(tensors, about)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, memoryview(data)[end:]])
