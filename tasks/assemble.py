"""Make the trainer's batch, in this order: shape rewards, leave out unjudged samples, drop zero-std groups, compute advantages and masks,
concatenate all sequences."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from prefect import task

from infra.config import BatchConfig, OverlongConfig
from infra.data.packing import packed, serialized
from infra.data.turns.credit import with_advantages
from infra.records import ScoredRollouts, TrainBatch
from infra.store.files import record_of, verified, write
from infra.store.layout import StepFolder
from infra.store.samples import Sample, conversations_of, groups_of, is_judged, num_retracted, read_samples, write_samples
from infra.telemetry.timings import measured
from tasks.support.caching import CACHED

log = logging.getLogger(__name__)


def with_overlong_penalty(samples: Sequence[Sample], config: OverlongConfig) -> list[Sample]:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13): 0 up to max - buffer tokens, then linear down to -penalty."""
    if not config.buffer_tokens:
        return list(samples)
    assert config.max_output_tokens
    begins = config.max_output_tokens - config.buffer_tokens
    lengths = [0] * len(samples)
    for positions in conversations_of(samples):
        length = sum(samples[i].num_sampled_tokens for i in positions)
        for i in positions:
            lengths[i] = length

    def penalised(sample: Sample, length: int) -> Sample:
        share = min(1.0, max(0.0, (length - begins) / config.buffer_tokens))
        return sample if sample.reward is None else replace(sample, reward=sample.reward - config.penalty * share)

    return [penalised(sample, length) for sample, length in zip(samples, lengths, strict=True)]


def judged_only(samples: Sequence[Sample]) -> list[Sample]:
    """Return the judged samples of groups that have two or more, in their order. An unjudged sample is in no mean, no advantage and no loss."""
    kept = {group[0].prompt_id for group in groups_of(samples) if is_judged(group)}
    return [sample for sample in samples if sample.prompt_id in kept and sample.reward is not None]


def without_retracted(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with those unjudged that have no routes, among samples that have some: the engine retracted their requests, so what
    they would be replayed with are not the routes of their log-probs."""
    if not num_retracted(samples):
        return list(samples)
    return [sample if sample.routes else replace(sample, reward=None, unjudged="retracted") for sample in samples]


def without_zero_std_groups(samples: Sequence[Sample], level: str = "episode") -> list[Sample]:
    """Return the samples of groups whose rewards are not all equal; at the level of turns, whose turns' rewards are not."""

    def rewards(conversation: Sequence[Sample]) -> object:
        of_turns = (reward for sample in conversation for reward in sample.turn_rewards or ())
        return (conversation[0].reward, tuple(of_turns) if level == "turn" else None)

    def are_equal(group: Sequence[Sample]) -> bool:
        return len({rewards([group[i] for i in positions]) for positions in conversations_of(group)}) == 1

    return [sample for group in groups_of(samples) if not are_equal(group) for sample in group]


def kept_groups(samples: Sequence[Sample], config: BatchConfig) -> list[Sample]:
    """Return the groups to train on. If all are zero-std groups, none is dropped: the run could not continue otherwise."""
    if not config.drop_zero_std_groups:
        return list(samples)
    groups = groups_of(without_zero_std_groups(samples, config.advantage_level)) or groups_of(samples)
    return [sample for group in groups[: config.max_groups] for sample in group]


@task(cache_policy=CACHED)
def assemble(config: BatchConfig, scored: ScoredRollouts) -> TrainBatch:
    """ScoredRollouts -> TrainBatch.

    Raises:
        ValueError: if no token is left to train on.
    """
    with measured(scored.run, scored.step, "assemble"):
        recorded = without_retracted(found := read_samples(verified(scored.file)))
        shaped = judged_only(with_overlong_penalty(recorded, config.overlong))
        if not shaped:
            raise ValueError(f"no group of step {scored.step} has two judged samples: nothing is left to learn from")
        samples = with_advantages(kept_groups(shaped, config), config)
        tensors = packed(samples, config)
        if not tensors["loss_mask"].any():
            raise ValueError(
                f"all {len(samples)} samples of step {scored.step} ran into max_output_tokens and are masked: nothing is left to learn from"
            )
        about = {
            "adapter_version": str(scored.adapter_version),
            "adapter_sha256": scored.adapter_sha256,
            "temperature": repr(scored.temperature),
            "advantage": config.advantage,
        }
        path = write(StepFolder.of(scored).batch, serialized(tensors, about))
        shown = write_samples(StepFolder.of(scored).assembled, [replace(sample, routes=None) for sample in samples])
    num_dropped = len(groups_of(shaped)) - len(groups_of(samples))
    if num_dropped:
        num_flat = len(groups_of(shaped)) - len(groups_of(without_zero_std_groups(shaped, config.advantage_level)))
        log.info(
            "of %d groups of step %d %d have equal rewards and are dropped, and %d remain",
            *(len(groups_of(shaped)), scored.step, num_flat, num_dropped - num_flat),
        )
    if retracted := num_retracted(found):
        log.warning(
            "%d of %d samples of step %d are dropped: the engine retracted them, and their routes are not those of their log-probabilities. A "
            "larger KV cache (engine.memory_fraction), or a lower engine.max_running_requests, retracts fewer",
            *(retracted, len(found), scored.step),
        )
    if scored.num_unjudged_groups:
        log.warning(
            "%d groups of step %d have fewer than two judged samples and teach nothing", scored.num_unjudged_groups, scored.step
        )
    if not tensors["advantages"].any():
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
        num_dropped_groups=num_dropped,
        samples=record_of(shown),
    )
