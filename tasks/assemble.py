"""Make the trainer's batch: advantages by group, masks, and all sequences in one row of tokens."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import safetensors.numpy
from prefect import task

from infra.config import BatchConfig
from infra.files import record_of, step_folder, verified, write
from infra.measures import measured
from infra.records import ScoredRollouts, TrainBatch
from infra.samples import Sample, groups_of, read_samples, write_samples
from tasks.caching import CACHED

log = logging.getLogger(__name__)

FILE, SAMPLES_FILE = "batch.safetensors", "assembled.parquet"
STD_EPS = 1e-6


def grpo(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (std + 1e-6) within one group, with the unbiased standard deviation.

    Source: DeepSeekMath (arXiv 2402.03300) eq. 3; as in verl-project/verl, verl/trainer/ppo/core_algos.py:268 at 1dda039.
    """
    spread = stdev(rewards) + STD_EPS
    return [centred / spread for centred in dr_grpo(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """reward - mean within one group. Source: Understanding R1-Zero-like training (arXiv 2503.20783)."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo}


def with_advantages(samples: Sequence[Sample], config: BatchConfig) -> list[Sample]:
    assembled: list[Sample] = []
    for group in groups_of(samples):
        advantages = ADVANTAGES[config.advantage]([sample.reward or 0.0 for sample in group])
        assembled += [replace(sample, advantage=advantage) for sample, advantage in zip(group, advantages, strict=True)]
    return assembled


def packed(samples: Sequence[Sample], config: BatchConfig) -> dict[str, np.ndarray]:
    """The tensors of batch.safetensors; see infra.megatron.job for names, shapes and units."""
    lengths = [len(sample.prompt_tokens) + len(sample.output_tokens) for sample in samples]
    columns: dict[str, list[float]] = {"tokens": [], "loss_mask": [], "rollout_logprobs": [], "advantages": []}
    for sample in samples:
        silent, spoken = len(sample.prompt_tokens), len(sample.output_tokens)
        counts = not (config.mask_truncated and sample.finish_reason == "length")
        columns["tokens"] += [*sample.prompt_tokens, *sample.output_tokens]
        columns["loss_mask"] += [0] * silent + [int(counts)] * spoken
        columns["rollout_logprobs"] += [0.0] * silent + sample.output_logprobs
        columns["advantages"] += [0.0] * silent + [sample.advantage or 0.0] * spoken
    return {
        "tokens": np.array(columns["tokens"], np.int64),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int64),
        "loss_mask": np.array(columns["loss_mask"], np.uint8),
        "rollout_logprobs": np.array(columns["rollout_logprobs"], np.float32),
        "advantages": np.array(columns["advantages"], np.float32),
    }


def serialized(tensors: dict[str, np.ndarray], about: dict[str, str]) -> bytes:
    """A safetensors file. Equal batches give equal bytes: safetensors alone writes its metadata in an order that changes."""
    data: bytes = safetensors.numpy.save(tensors, about)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


@task(cache_policy=CACHED)
def assemble(config: BatchConfig, scored: ScoredRollouts) -> TrainBatch:
    """ScoredRollouts -> TrainBatch.

    Raises:
        ValueError: if no token is left to learn from.
    """
    with measured(scored.run, scored.step, "assemble"):
        samples = with_advantages(read_samples(verified(scored.file)), config)
        tensors = packed(samples, config)
        if not tensors["loss_mask"].any():
            raise ValueError(
                f"all {len(samples)} samples of step {scored.step} ran into max_output_tokens and are masked: nothing is left to learn from"
            )
        about = {
            "adapter_version": str(scored.adapter_version),
            "adapter_sha256": scored.adapter_sha256,
            "temperature": repr(scored.temperature),
        }
        write_samples(step_folder(scored) / SAMPLES_FILE, samples)
        path = write(step_folder(scored) / FILE, serialized(tensors, about))
    if not scored.num_trainable_groups:
        log.warning("every group of step %d has equal rewards: this step teaches nothing", scored.step)
    return TrainBatch(
        run=scored.run,
        step=scored.step,
        adapter_version=scored.adapter_version,
        adapter_sha256=scored.adapter_sha256,
        file=record_of(path),
        num_sequences=len(samples),
        num_tokens=len(tensors["tokens"]),
        num_loss_tokens=int(tensors["loss_mask"].sum()),
    )
