"""Wall time of a comparison: seconds of one engine's starts and steps, by part. They add up to the time of its blocks, except for restarts
after an interruption and for the end of each engine."""

from collections.abc import Sequence

from infra.comparison.measurement.measures import EngineStart, StepMeasures


def seconds(starts: Sequence[EngineStart], steps: Sequence[StepMeasures]) -> dict[str, float]:
    """Return the seconds by part. `else` is the remaining time of the steps: quality, probes, files."""
    of_steps = {
        part: sum(getattr(step, f"{part}_s") for step in steps)
        for part in ("rollout", "release", "training", "wake", "reload", "checks", "lost")
    }
    rest = sum(step.wall_s for step in steps) - sum(of_steps.values())
    return {
        "wait for memory": sum(start.wait_s for start in starts),
        "start": sum(start.start_s for start in starts),
        "first adapter": sum(start.load_s for start in starts),
        "warm-up": sum(start.warm_up_s for start in starts),
        **of_steps,
        "checks": of_steps["checks"] + sum(start.checks_s for start in starts),
        "else": max(rest, 0.0),
    }
