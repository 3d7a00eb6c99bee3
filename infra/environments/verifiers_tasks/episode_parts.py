"""What an episode of verifiers comes to, as parts of a reward. Standard library only: verifiers is not imported here."""

import re
from typing import Any

STOP, DONE, MAX_TURNS, RESTART, HARNESS = "stop reason", 0.0, 1.0, "restart", "harness"
"""As infra/environments/parts.py has them, whose imports are not installed here."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]")


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
