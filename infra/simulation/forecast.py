"""What a simulation says of a run."""

from collections.abc import Sequence
from typing import NamedTuple

from infra.simulation.run import SimulatedRun
from infra.simulation.scenario import Scenario


class Forecast(NamedTuple):
    """Figures of the measured steps, from the end of a training to the end of the last one."""

    num_steps: int
    num_samples: int
    """Of all steps."""
    seconds: float
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    """Sampled tokens."""
    tokens_per_s_per_gpu: float
    gpu_idle_share: float
    """Share of the GPUs' seconds in which neither a request ran nor the trainer computed, 0 to 1."""
    mean_staleness: float
    """RL steps by which a trained sample's adapter was older, mean."""
    num_failures: int
    effective_ratio: float
    """Effective training time: seconds of the same steps without failures, as a share of `seconds`."""


def simulate(scenario: Scenario, recorded: Sequence[int] = ()) -> Forecast:
    """Simulate a run, with failures and, to compare, without.

    recorded: Tokens of recorded samples, in their order, which take the place of drawn lengths.

    Raises:
        ValueError: for recorded samples with several turns.
    """
    if recorded and scenario.turns > 1:
        raise ValueError(f"turns is {scenario.turns}: recorded samples have one turn each")
    calm = SimulatedRun(scenario.but(failures_every=0, gpu_mtbf_hours=0), recorded).run()
    calm_s = seconds_of(calm)
    if not scenario.has_failures:
        return _forecast(calm, calm_s)
    return _forecast(SimulatedRun(scenario, recorded, nominal_step_s=calm_s / scenario.num_steps).run(), calm_s)


def seconds_of(run: SimulatedRun) -> float:
    return run.totals[-1].at_s - run.totals[0].at_s


def _forecast(run: SimulatedRun, calm_s: float) -> Forecast:
    scenario, first, last = run.scenario, run.totals[0], run.totals[-1]
    seconds, num_trained = seconds_of(run), sum(run.staleness.values())
    num_tokens = last.num_tokens - first.num_tokens
    computing_s = (last.engine_busy_s - first.engine_busy_s) * scenario.tensor_parallel
    computing_s += (last.trainer_busy_s - first.trainer_busy_s) * (scenario.trainer_gpus or scenario.gpus)
    return Forecast(
        num_steps=scenario.num_steps,
        num_samples=num_trained,
        seconds=seconds,
        step_s=seconds / scenario.num_steps,
        samples_per_s=num_trained / seconds,
        tokens_per_s=num_tokens / seconds,
        tokens_per_s_per_gpu=num_tokens / seconds / scenario.gpus,
        gpu_idle_share=max(0.0, 1 - computing_s / (seconds * scenario.gpus)),
        mean_staleness=sum(age * count for age, count in run.staleness.items()) / num_trained,
        num_failures=sum(run.num_failures.values()),
        effective_ratio=calm_s / seconds,
    )
