"""Dynamic sampling: make one step of the groups of several draws.

draws/01/{prompts.jsonl, samples.parquet, scored.parquet}, draws/02/... --> draws.jsonl and prompts, samples and scores of the step

Source: DAPO (arXiv 2503.14476, section 3.2, equation 11). As in verl (recipe/dapo/dapo_ray_trainer.py), draws go on until enough groups have
different rewards, and useful groups above that number are dropped. Unlike there, a later draw has only as many prompts as are likely to do, and
after the last draw the step goes on, filled up with groups of equal rewards.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

from prefect import task

from infra.config import DataConfig
from infra.data.forms.curriculum import pass_rate_of
from infra.data.prompts import Prompt
from infra.failures import EngineUnavailable
from infra.records import Draw, Draws, File, PromptBatch, Rollouts, ScoredRollouts, Step
from infra.store.files import read_json_lines, record_of, verified, write_json, write_json_lines
from infra.store.layout import StepFolder, step_folder
from infra.store.samples import WHOLE_REWARD, Sample, episodes_of, groups_of, is_judged, read_samples, write_samples
from infra.telemetry.timings import measured
from tasks.support.caching import CACHED
from tasks.support.rollout import ENGINE, engine_ran
from tasks.support.rollout import counts_of as counts_of_samples

log = logging.getLogger(__name__)

Reason = Literal["useful", "fills up", "more than are needed", "equal rewards", "fewer than two judged", "not finished"]
KEPT: tuple[Reason, ...] = ("useful", "fills up")


class DrawnGroup(NamedTuple):
    """A line of draws.jsonl."""

    draw: int
    prompt_id: int
    row_number: int
    reason: Reason
    """Groups that are useful or fill up are the step's."""
    mean_reward: float | None
    """Over the judged samples; None where there are none."""
    num_judged: int
    num_samples: int
    pass_rate: float | None
    """As mean_reward, each reward cut to 0 to 1."""


def num_useful(draws: Sequence[Draw]) -> int:
    return sum(draw.scored.num_trainable_groups for draw in draws)


def num_wanted(config: DataConfig, draws: Sequence[Draw]) -> int | None:
    """Return how many prompts the next draw needs, by the share of useful groups so far. None: all of a draw; 0: there is no next draw.

    draws: Those that are made.
    """
    missing = config.num_prompts - num_useful(draws)
    if missing <= 0 or len(draws) >= config.max_draws:
        return 0
    if not draws or config.num_oversampled_prompts:
        return None
    num_groups = sum(draw.scored.num_prompts for draw in draws)
    return min(config.num_prompts, math.ceil(missing * num_groups / max(1, num_useful(draws))))


def is_useful(group: Sequence[Sample]) -> bool:
    """Whether the rewards of a group differ. Unjudged samples have none."""
    return len({sample.reward for sample in group} - {None}) > 1


def chosen(groups: Sequence[Sequence[Sample]], num: int) -> list[Reason]:
    """Return what becomes of each group: the first useful ones are kept; where they are too few, the first others that are judged fill up."""
    reasons: list[Reason] = []
    num_kept, num_missing = 0, num - sum(map(is_useful, groups))
    for group in groups:
        if is_useful(group):
            reasons.append("useful" if num_kept < num else "more than are needed")
            num_kept += 1
        elif is_judged(group):
            reasons.append("fills up" if num_missing > 0 else "equal rewards")
            num_missing -= 1
        else:
            reasons.append("fewer than two judged")
    return reasons


def lines_of(draws: Sequence[Draw], groups: Mapping[int, Sequence[Sample]], num: int) -> dict[int, DrawnGroup]:
    """Return what became of each drawn group, by prompt id.

    groups: The finished ones.
    num: Groups of the step.
    """
    reasons = dict(zip(groups, chosen([*groups.values()], num), strict=True))
    lines = {}
    for draw in draws:
        for prompt in prompts_of(draw.prompts):
            group = [episode[0] for episode in episodes_of(groups.get(prompt.prompt_id, []))]
            judged = [sample.reward for sample in group if sample.reward is not None]
            lines[prompt.prompt_id] = DrawnGroup(
                draw=draw.prompts.draw,
                prompt_id=prompt.prompt_id,
                row_number=prompt.row_number,
                reason=reasons.get(prompt.prompt_id, "not finished"),
                mean_reward=fmean(judged) if judged else None,
                num_judged=len(judged),
                num_samples=len(group),
                pass_rate=pass_rate_of(judged) if judged else None,
            )
    return lines


def counts_of(lines: Sequence[DrawnGroup]) -> dict[str, float]:
    """Return the metrics of a step's draws."""
    reasons = Counter(line.reason for line in lines)
    finished = [line for line in lines if line.reason != "not finished"]
    of_judged = [line.mean_reward * line.num_judged for line in finished if line.mean_reward is not None]
    return {
        "draws/num_draws": float(lines[-1].draw),
        "draws/num_groups": float(len(lines)),
        "draws/useful_frac": (reasons["useful"] + reasons["more than are needed"]) / len(finished),
        "draws/num_equal_rewards": float(reasons["equal rewards"] + reasons["fills up"]),
        "draws/num_more_than_needed": float(reasons["more than are needed"]),
        "draws/num_filled_up": float(reasons["fills up"]),
        "draws/mean_reward": sum(of_judged) / sum(line.num_judged for line in finished),
    }


def prompts_of(batch: PromptBatch) -> list[Prompt]:
    return [Prompt(**row) for row in read_json_lines(verified(batch.file))]


@task(cache_policy=CACHED)
def gather_draws(config: DataConfig, step: Step, draws: Draws) -> Draw:
    """Draws -> prompts, samples and scores of the step."""
    with measured(step.run, step.index, "gather"):
        of_draws = [read_samples(verified(draw.scored.file)) for draw in draws.draws]
        groups = {group[0].prompt_id: group for samples in of_draws for group in groups_of(samples)}
        lines = lines_of(draws.draws, groups, config.num_prompts)
        kept = {number for number, line in lines.items() if line.reason in KEPT}
        counts = counts_of([*lines.values()])
        log.info(
            "step %d: %s", step.index, ", ".join(f"{name.removeprefix('draws/')} {value:g}" for name, value in counts.items())
        )
        folder, of_first = StepFolder.of(step), draws.draws[0].prompts
        asked = [prompt for draw in draws.draws for prompt in prompts_of(draw.prompts) if prompt.prompt_id in kept]
        prompts = of_first.model_copy(
            update={
                "draw": 0,
                "file": record_of(write_json_lines(folder.prompts, (prompt.to_json() for prompt in asked))),
                "num_prompts": len(asked),
                "num_oversampled_prompts": 0,
                "draws": record_of(write_json_lines(folder.draws, (line._asdict() for line in lines.values()))),
                "draw_counts": of_first.draw_counts | counts,
            }
        )
        rollouts = _rollouts(step, draws, kept)
        return Draw(
            prompts=prompts,
            rollouts=rollouts,
            scored=_scored(
                step, rollouts, [groups[number] for number in groups if number in kept], _judgements(step, draws, kept)
            ).model_copy(update={"reward_source": " ".join(dict.fromkeys(each.scored.reward_source for each in draws.draws))}),
        )


def _rollouts(step: Step, draws: Draws, kept: set[int]) -> Rollouts:
    """Write the samples of the step.

    Raises:
        EngineUnavailable: for draws of several versions of the engine.
    """
    folder, of_draws = StepFolder.of(step), [draw.rollouts for draw in draws.draws]
    ran = [engine_ran(step_folder(each)) for each in of_draws]
    if any(each != ran[0] for each in ran):
        raise EngineUnavailable(
            f"the draws of step {step.index} were sampled by several versions of the engine: remove {folder.path / 'draws'}"
        )
    samples = [each for rollouts in of_draws for each in read_samples(verified(rollouts.file)) if each.prompt_id in kept]
    file = record_of(write_samples(folder.samples, samples))
    inputs = {"draws": " ".join(each.file.sha256 for each in of_draws)}
    write_json(folder.samples_inputs, {"inputs": inputs, "file": file.model_dump(), ENGINE: ran[0].model_dump()})
    return of_draws[0].model_copy(
        update={
            "draw": 0,
            "file": file,
            "num_prompts": len(kept),
            **counts_of_samples(samples, of_episodes=of_draws[0].is_judged),
        }
    )


def _judgements(step: Step, draws: Draws, kept: set[int]) -> File | None:
    """Write what a model said of the step's groups. None: no model judged."""
    files = [draw.scored.judgements for draw in draws.draws if draw.scored.judgements]
    if not files:
        return None
    rows = (row for file in files for row in read_json_lines(verified(file)) if row["prompt_id"] in kept)
    return record_of(write_json_lines(StepFolder.of(step).judgements, rows))


def _scored(step: Step, rollouts: Rollouts, groups: Sequence[Sequence[Sample]], judgements: File | None) -> ScoredRollouts:
    """Write the scores of the step."""
    samples = [sample for group in groups for sample in group]
    firsts = [episode[0] for episode in episodes_of(samples)]
    rewards = [sample.reward for sample in firsts if sample.reward is not None]
    parts: dict[str, list[float]] = {}
    for sample in firsts:
        for name, value in (sample.reward_parts or {}).items():
            parts.setdefault(name, []).append(value)
    parts = {} if set(parts) == {WHOLE_REWARD} else dict(sorted(parts.items()))
    return ScoredRollouts(
        run=rollouts.run,
        step=rollouts.step,
        adapter_version=rollouts.adapter_version,
        adapter_sha256=rollouts.adapter_sha256,
        file=record_of(write_samples(StepFolder.of(step).scored, samples)),
        num_prompts=len(groups),
        group_size=rollouts.group_size,
        temperature=rollouts.temperature,
        num_samples=len(firsts),
        mean_reward=fmean(rewards),
        std_reward=pstdev(rewards),
        num_trainable_groups=sum(map(is_useful, groups)),
        part_means={name: fmean(values) for name, values in parts.items()},
        part_stds={name: pstdev(values) for name, values in parts.items()},
        num_unjudged=dict(sorted(Counter(sample.unjudged for sample in firsts if sample.unjudged).items())),
        num_unjudged_groups=sum(not is_judged(group) for group in groups),
        judgements=judgements,
    )
