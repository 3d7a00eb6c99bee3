"""Give every sample its reward."""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from prefect import task

from infra.concurrency.deadline import Deadline
from infra.config import RewardConfig
from infra.data.prompts import Prompt
from infra.models import base_model
from infra.records import PromptBatch, Rollouts, ScoredRollouts
from infra.rewards.judges.ledger import step_work
from infra.store.files import read_json, read_json_lines, record_of, verified
from infra.store.layout import StepFolder
from infra.store.samples import WHOLE_REWARD, Sample, episodes_of, groups_of, is_judged, read_samples, write_samples
from infra.telemetry.timings import measured, verb_of
from tasks import rewards
from tasks.rewards import by_judge_server, by_model
from tasks.rewards.apply import inputs_of, judged
from tasks.rewards.by_model import JudgedWork
from tasks.support.caching import cached

log = logging.getLogger(__name__)


def shuffled(samples: Sequence[Sample], seed: int, step: int) -> list[Sample]:
    """Shuffle the rewards over the episodes of the step: the control. Any metric that still improves did not learn from the rewards."""
    episodes = episodes_of(samples)
    order = random.Random(f"{seed}/{step}").sample(range(len(episodes)), len(episodes))
    others = {mine[0].episode: episodes[number][0] for mine, number in zip(episodes, order, strict=True)}
    pairs = ((sample, others[sample.episode]) for sample in samples)
    return [
        replace(sample, reward=other.reward, reward_parts=other.reward_parts, unjudged=other.unjudged, turn_rewards=None)
        for sample, other in pairs
    ]


def num_trainable_groups(samples: Sequence[Sample]) -> int:
    """Number of groups whose rewards are not all equal. Unjudged samples have none."""
    return sum(len({sample.reward for sample in group} - {None}) > 1 for group in groups_of(samples))


def values_by_part(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the values of each named part of the reward, sorted by name. Empty if the reward returned plain numbers."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for part, value in (sample.reward_parts or {}).items():
            values.setdefault(part, []).append(value)
    return {} if set(values) == {WHOLE_REWARD} else dict(sorted(values.items()))


def _base_sha256(rollouts: Rollouts) -> str:
    """Digest of the run's base model. A draw has no configuration of its own: the step's holds for it."""
    return base_model.reference(read_json(StepFolder.at(rollouts.run, rollouts.step).config)["model"]).sha256


@task(cache_policy=cached(also=lambda inputs: rewards.source_digests(inputs["config"]), without=("deadline",)))
def score(config: RewardConfig, rollouts: Rollouts, prompts: PromptBatch, deadline: Deadline | None = None) -> ScoredRollouts:
    """Rollouts -> ScoredRollouts.

    deadline: Of the scoring. None: it begins now.

    What a reward outside has judged is in the journal at once: a scoring that is killed goes on at the missing samples.

    Raises:
        RewardFailed: if more samples are unjudged than reward.max_unjudged_frac allows.
    """
    asked, folder = [Prompt(**row) for row in read_json_lines(verified(prompts.file))], StepFolder.of(rollouts)
    base = _base_sha256(rollouts) if config.is_judged_by_engine else by_judge_server.sha256_of(config)
    work = JudgedWork(rollouts.run, step_work(rollouts.step), folder.judgements, base_sha256=base)
    with measured(rollouts.run, rollouts.step, verb_of("score", rollouts.draw)) as figures:
        samples = read_samples(verified(rollouts.file))
        if not rollouts.is_judged:
            samples = judged(config, samples, asked, folder.scores_journal, inputs_of(prompts), work=work, deadline=deadline)
        source = rewards.source_digests(config)
        if config.is_judged_by_model:
            figures |= by_model.figures_of(config.judge, work)
        if config.shuffle_seed is not None:
            samples = shuffled(samples, config.shuffle_seed, rollouts.step)
        path = write_samples(folder.scored, samples)
        folder.scores_journal.unlink(missing_ok=True)
    firsts = [episode[0] for episode in episodes_of(samples)]  # an episode counts once, however many trajectories it has
    values, parts = [sample.reward for sample in firsts if sample.reward is not None], values_by_part(firsts)
    if not values:
        raise ValueError(f"none of the {len(firsts)} samples of step {rollouts.step} is judged: nothing is left to learn from")
    trainable = num_trainable_groups(samples)
    log.info("mean reward %.3f; %d of %d groups are not all alike", fmean(values), trainable, rollouts.num_prompts)
    return ScoredRollouts(
        run=rollouts.run,
        step=rollouts.step,
        draw=rollouts.draw,
        adapter_version=rollouts.adapter_version,
        adapter_sha256=rollouts.adapter_sha256,
        file=record_of(path),
        num_prompts=rollouts.num_prompts,
        group_size=rollouts.group_size,
        temperature=rollouts.temperature,
        num_samples=len(firsts),
        mean_reward=fmean(values),
        std_reward=pstdev(values),
        num_trainable_groups=trainable,
        part_means={part: fmean(of_part) for part, of_part in parts.items()},
        part_stds={part: pstdev(of_part) for part, of_part in parts.items()},
        num_unjudged=dict(sorted(Counter(sample.unjudged for sample in firsts if sample.unjudged).items())),
        num_unjudged_groups=sum(not is_judged(group) for group in groups_of(samples)),
        judgements=record_of(folder.judgements) if config.is_judged_by_model else None,
        reward_source=source,
    )
