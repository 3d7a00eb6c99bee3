"""Dynamic sampling: draw, sample and score until enough groups have different rewards.

Each draw is made by the tasks that make a step, with journal, inputs key and digests of its own. So a step that is killed in its third draw
goes on there.
"""

from infra.concurrency.prefetch import Prefetch
from infra.config import EngineConfig, RunConfig
from infra.records import AdapterVersion, Draw, Draws, Step
from tasks.draw_prompts import draw_prompts
from tasks.gather_draws import gather_draws, num_wanted
from tasks.roll_out import roll_out
from tasks.score import score
from tasks.wake_engine import wake_engine


def draw_until_useful(
    config: RunConfig, engine: EngineConfig, step: Step, adapter: AdapterVersion, prefetch: Prefetch | None = None
) -> Draw:
    """Make the draws of a step, data.max_draws at most, and gather them."""
    draws: list[Draw] = []
    while (num := num_wanted(config.data, draws)) != 0:
        current = step.model_copy(update={"draw": len(draws) + 1})
        prompts = draw_prompts(config.training, current, adapter, None, num)
        if not draws:
            wake_engine(engine, adapter, prefetch)
        rollouts = roll_out(engine, config.sampling, prompts, adapter)
        draws.append(Draw(prompts=prompts, rollouts=rollouts, scored=score(config.reward, rollouts, prompts)))
    return gather_draws(config.data, step, Draws(draws=tuple(draws)))
