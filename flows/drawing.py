"""The first half of a step: draw prompts, sample them and score the samples.

A step has one draw. With dynamic sampling it has several, until enough groups have different rewards. Each of them is made by the same tasks,
with journal, inputs key and digests of its own. So a step that is killed in its third draw goes on there.
"""

from contextlib import AbstractContextManager, nullcontext

from infra.concurrency.background import in_background
from infra.concurrency.deadline import Deadline
from infra.concurrency.prefetch import Prefetch
from infra.config import DataConfig, EngineConfig, RewardConfig, RunConfig
from infra.records import AdapterVersion, Draw, Draws, PromptBatch, Rollouts, ScoredRollouts, Step
from tasks.draw_prompts import carried_over, draw_prompts, known_pass_rates
from tasks.gather_draws import gather_draws, num_wanted
from tasks.release_memory import release_memory
from tasks.rewards.ahead import scored_ahead
from tasks.rewards.by_engine import ask_engine
from tasks.rewards.by_judge_server import ask_judge, start_judge
from tasks.roll_out import roll_out
from tasks.score import score
from tasks.support.prefetch_rollout import adapter_switch, behavior_adapter
from tasks.wake_engine import wake_engine


def draw_samples(
    config: RunConfig, engine: EngineConfig, step: Step, adapter: AdapterVersion, prefetch: Prefetch | None = None
) -> tuple[PromptBatch, Rollouts, ScoredRollouts]:
    """Make the draws of a step, data.max_draws at most, and gather them. The engine's memory is released at the end."""
    draws: list[Draw] = []
    known = known_pass_rates(config, step)
    while (num := num_wanted(config.data, draws)) != 0:
        place = place_of(config.data, step, len(draws) + 1)
        prompts = draw_prompts(config.training, place, adapter, carried_over(config, step), num, known)
        if not draws:
            start_judge(engine, config.reward, adapter, prefetch)
            wake_engine(engine, adapter, prefetch)
        behavior = behavior_adapter(config, step, adapter)
        deadline = Deadline(config.reward.task_timeout_s)
        with scored_ahead(config, prompts, adapter, deadline) as end_ahead:
            switch = adapter_switch(config, step)
            rollouts = roll_out(engine, config.sampling, prompts, behavior, prefetch, config.played, switch)
            deadline.begin()
            have_judged(engine, config.reward, rollouts, prompts, adapter, deadline)
            is_last = len(draws) + 1 == config.data.max_draws
            with released(engine, config.reward, adapter) if is_last else nullcontext():
                end_ahead()
                scored = score(config.reward, rollouts, prompts, deadline)
                draws.append(Draw(prompts=prompts, rollouts=rollouts, scored=scored))
    if len(draws) < config.data.max_draws:
        release_memory(engine, adapter)
    made = gather_draws(config.data, step, Draws(draws=tuple(draws))) if config.data.max_draws > 1 else draws[0]
    return made.prompts, made.rollouts, made.scored


def have_judged(
    engine: EngineConfig,
    reward: RewardConfig,
    rollouts: Rollouts,
    prompts: PromptBatch,
    adapter: AdapterVersion,
    deadline: Deadline,
) -> None:
    """Have the judge answer, if it is the run's own engine, or a second model that takes the engine's place on the GPUs."""
    if reward.is_judged_by_engine:
        ask_engine(engine, reward, rollouts, prompts, adapter, deadline)
    if reward.has_judge_server:
        release_memory(engine, adapter)
        ask_judge(engine, reward, rollouts, prompts, adapter, deadline)


def released(engine: EngineConfig, reward: RewardConfig, adapter: AdapterVersion) -> AbstractContextManager[object]:
    """Release the engine's memory while the block runs; before it, if a reward model takes its place, or a judge has taken it."""
    if reward.has_judge_server:
        return nullcontext()
    if reward.uses_reward_model:
        release_memory(engine, adapter)
        return nullcontext()
    # Perf: release and scoring took 0.12 s each, one after the other (7B, H200, docs/history/decisions.md).
    return in_background(release_memory, engine, adapter)


def place_of(config: DataConfig, step: Step, number: int) -> Step:
    """Return where a draw has its files: in a folder of its own where there may be several, else in that of the step.

    number: Of the draw, from 1.
    """
    return step.model_copy(update={"draw": number}) if config.max_draws > 1 else step
