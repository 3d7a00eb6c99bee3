"""The worker's side of an episode of a taskset: a pool of infra.rewards in verifiers' own environment calls `play` as it calls a reward.

The task's data goes in, its reward comes out; in between verifiers' own episode runs. Its model is the session of the gateway.
"""

import asyncio
import os
import re
from typing import Any

from infra.environments.tools import CallJournal
from infra.environments.verifiers_tasks import tasksets
from infra.environments.verifiers_tasks.limits import LIMITS, Limits

KEY = "RATCHET_SESSION_API_KEY"
"""The variable that holds the session's key, which verifiers takes by its name. verifiers keeps variables of such names from its tool servers."""
STOP, DONE, MAX_TURNS, RESTART = "stop reason", 0.0, 1.0, "restart"
"""As infra/environments/parts.py has them, whose imports are not installed here."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]")
Row = dict[str, Any]


def play(*, row: Row) -> dict[str, float]:
    """Play one episode. Returns its reward, with its parts and metrics, and the stop reason.

    row: The fields of infra.environments.runner.PlayedEpisode.

    Raises:
        ValueError: for a taskset that cannot be used, and a row that is none of its tasks.
        RuntimeError: if the episode failed; its first error in one line.
        TimeoutError: after episode_timeout_s.
    """
    environment = tasksets.load(row["taskset"], row["max_turns"])
    if row["task"] is None:
        return {"reward": 0.0} | ({} if row["repeats_tools"] else {RESTART: 1.0})
    if not isinstance(data := row["task"].get("task"), dict):
        raise ValueError(f"the row has no column 'task': take data.source 'verifiers:{row['taskset']}'")
    journal = CallJournal(row["base_url"], row["api_key"])
    journal.begin_episode()
    LIMITS.set(Limits(row["turn_timeout_s"], row["max_observation_tokens"], row["tokenizer"], journal, row["repeats_tools"]))
    return parts_of(asyncio.run(_played(environment, data, row)))


async def _played(environment: Any, data: Row, row: Row) -> Any:
    import verifiers.v1 as vf

    task = tasksets.task_of(environment, data)
    os.environ[KEY] = row["api_key"]
    client = vf.EvalClientConfig(base_url=row["base_url"], api_key_var=KEY)
    context = vf.ModelContext(model=row["model"], client=client)
    try:
        async with asyncio.timeout(row["episode_timeout_s"]):
            async with environment.serving():
                return await environment.run_episode(task, context)
    except TimeoutError:
        raise TimeoutError(f"the episode was not done after environment.episode_timeout_s {row['episode_timeout_s']:g}") from None
    finally:
        os.environ.pop(KEY, None)


def parts_of(episode: Any) -> dict[str, float]:
    """Raises RuntimeError for an episode without a whole reward: verifiers would count what failed as 0."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        said = f"{errors[0].type}: {errors[0].message}" if errors else f"{len(episode.traces)} runs of its agent, 1 is supported"
        raise RuntimeError(f"the taskset's episode failed: {' '.join(said.split()):.300}")
    (trace,) = episode.traces
    if missing := [name for name, reward in trace.rewards.items() if reward is None or reward.score is None]:
        raise RuntimeError(f"the taskset's reward {missing[0]!r} has no value")
    found = trace.metrics | {name: reward.score for name, reward in trace.rewards.items()}
    parts = {NOT_IN_NAMES.sub("_", name)[:64]: float(value) for name, value in found.items() if value is not None}
    stop = MAX_TURNS if str(trace.stop_condition or "").startswith("max_turns") else DONE
    return parts | {"reward": float(trace.reward), STOP: stop}
