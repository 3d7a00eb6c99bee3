"""The samples of a simulated step, and how long they are."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from infra.simulation.scenario import Scenario


@dataclass(eq=False)
class SimulatedRequest:
    """A sample, or what is left of it."""

    step: int
    prompt: int
    turns: list[int]
    """Tokens of the turns that are left, the present one first."""
    whole: tuple[int, ...]
    """Tokens of all its turns."""
    sampled_by: int = -1
    """Version of the adapter at its first token; -1: it has not begun."""

    def begin_again(self) -> None:
        self.turns, self.sampled_by = list(self.whole), -1


class Lengths:
    """Tokens of samples: recorded ones in their order, which keeps what the samples of a group have in common; or drawn ones."""

    def __init__(self, scenario: Scenario, recorded: Sequence[int] = ()) -> None:
        """recorded: Tokens of samples, used again and again in place of drawn ones. Each sample has one turn then."""
        self._scenario, self._recorded, self._num_given = scenario, recorded, 0
        self._rng = random.Random(scenario.seed)
        self._log_mean = math.log(scenario.mean_tokens) - scenario.log_spread**2 / 2

    def requests_of(self, step: int) -> list[SimulatedRequest]:
        of_samples = [self._turns() for _ in range(self._scenario.num_samples)]
        size = self._scenario.group_size
        return [SimulatedRequest(step, number // size, list(turns), turns) for number, turns in enumerate(of_samples)]

    def _turns(self) -> tuple[int, ...]:
        scenario = self._scenario
        self._num_given += 1
        if self._recorded:
            return (self._recorded[(self._num_given - 1) % len(self._recorded)],)
        return tuple(self._drawn() for _ in range(scenario.turns))

    def _drawn(self) -> int:
        drawn = self._rng.lognormvariate(self._log_mean, self._scenario.log_spread)
        return max(1, min(round(drawn), self._scenario.max_tokens))
