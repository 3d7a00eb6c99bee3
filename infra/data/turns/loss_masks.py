"""Which output tokens count in the loss: sampled ones, each once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from infra.config import BatchConfig
from infra.store.samples import Sample


def loss_masks(samples: Sequence[Sample], config: BatchConfig) -> list[NDArray[np.bool_]]:
    """For each output token of each sample, whether it counts in the loss: it was sampled, and is in no earlier branch of its episode."""
    masks: list[NDArray[np.bool_]] = []
    branches: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        mask = sample.is_sampled
        if config.mask_truncated and sample.is_truncated:
            mask = np.zeros_like(mask)
        if sample.segments:
            earlier = branches.setdefault(sample.episode, [])
            mask[: max((_num_shared(sample, other) for other in earlier), default=0)] = False
            earlier.append(sample)
        masks.append(mask)
    return masks


def _num_shared(sample: Sample, other: Sample) -> int:
    """Return the number of first output tokens in segments that two branches have in common: they were sampled once."""
    mine, theirs = _whole(sample), _whole(other)
    shared = 0
    for a, b in zip(sample.segments, other.segments, strict=False):
        end = shared + a.num_tokens
        if a != b or not np.array_equal(mine[shared:end], theirs[shared:end]):
            break
        shared = end
    return max(0, shared - len(sample.prompt_tokens))


def _whole(sample: Sample) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(part, np.int64) for part in (sample.prompt_tokens, sample.output_tokens)])
