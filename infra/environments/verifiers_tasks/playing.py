"""The worker's side of an episode of a taskset: a pool of infra.rewards in verifiers' own environment calls `play` as it calls a reward.

The task's data goes in, its reward comes out; in between verifiers' own episode runs. Its model is the session of the gateway.
"""

import asyncio
import os
from typing import Any

from infra.environments.tools import CallJournal
from infra.environments.verifiers_tasks import harness, tasksets
from infra.environments.verifiers_tasks.episode_parts import HARNESS, RESTART, parts_of
from infra.environments.verifiers_tasks.limits import LIMITS, Limits

KEY = "RATCHET_SESSION_API_KEY"
"""The variable that holds the session's key, which verifiers takes by its name. verifiers keeps variables of such names from its tool servers."""
__all__ = ["harness", "play"]  # the harness imports verifiers: when the worker starts, and not in the time of an episode
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
        has_harness = tasksets.has_harness(row["taskset"])
        return {"reward": 0.0} | ({} if row["repeats_tools"] else {RESTART: 1.0}) | ({HARNESS: 1.0} if has_harness else {})
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
