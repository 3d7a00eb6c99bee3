"""All simulated replicas: who samples what. As infra/engines/replicas does it: a prompt goes to one replica, an idle one takes over half of
what waits at the busiest, and what a lost one had not finished goes to the others."""

import random
from collections.abc import Callable, Iterable

from infra.simulation.clock import EventClock
from infra.simulation.replica import SimulatedReplica
from infra.simulation.requests import SimulatedRequest
from infra.simulation.scenario import Scenario


class Fleet:
    def __init__(
        self, clock: EventClock, scenario: Scenario, version: Callable[[], int], finished: Callable[[SimulatedRequest], None]
    ) -> None:
        """version: Of the served adapter, now. finished: Called for each sample that is complete."""
        self._clock, self._scenario, self._version, self._finished = clock, scenario, version, finished
        self._rng = random.Random(scenario.seed + 1)
        self.replicas = [SimulatedReplica(clock, scenario, self._begun, self._ended) for _ in range(scenario.num_replicas)]
        self._in_tools: dict[SimulatedRequest, SimulatedReplica] = {}
        """Requests between two turns, with the replica that makes the next one."""
        self.num_tokens = 0

    @property
    def living(self) -> list[SimulatedReplica]:
        return [replica for replica in self.replicas if replica.is_up]

    def busy_s(self) -> float:
        """Seconds in which replicas computed, summed."""
        return sum(replica.counted_busy_s() for replica in self.replicas)

    def add(self, requests: Iterable[SimulatedRequest]) -> None:
        """Share requests among the living replicas, each prompt to one of them."""
        living = self.living
        shares: list[list[SimulatedRequest]] = [[] for _ in living]
        for request in requests:
            shares[request.prompt % len(living)].append(request)
        for replica, share in zip(living, shares, strict=True):
            if share:
                replica.add(share)

    def lose_one(self) -> SimulatedReplica:
        """Lose a replica. What it had not finished goes to the others; without another it waits there."""
        lost = self._rng.choice(self.living)
        left = lost.take_back()
        for request in left:
            request.sampled_by = -1 if len(request.turns) == len(request.whole) else request.sampled_by
        lost.is_up = False
        if self.living:
            self.add(left)
        else:
            lost.waiting += left
        return lost

    def restart(self, replica: SimulatedReplica) -> None:
        replica.is_up = True
        replica.add(())

    def take_back(self) -> list[SimulatedRequest]:
        """Give up all unfinished samples, as when the flow process ends; they begin again."""
        left = [request for replica in self.replicas for request in replica.take_back()] + list(self._in_tools)
        self._in_tools = {}
        for request in left:
            request.begin_again()
        return sorted(left, key=lambda request: (request.step, request.prompt))

    def set_paused(self, is_paused: bool) -> None:
        for replica in self.replicas:
            replica.set_paused(is_paused)

    def _begun(self, request: SimulatedRequest) -> None:
        if request.sampled_by < 0:
            request.sampled_by = self._version()

    def _ended(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        self.num_tokens += request.turns.pop(0)
        if request.turns:
            self._in_tools[request] = replica
            latency_s = self._scenario.tool_latency_s
            pause_s = self._rng.expovariate(1 / latency_s) if latency_s else 0.0
            self._clock.after(pause_s, lambda: self._next_turn(request))
        else:
            self._finished(request)
        if replica.is_idle and not replica.is_paused:
            self._take_over(replica)

    def _next_turn(self, request: SimulatedRequest) -> None:
        replica = self._in_tools.pop(request, None)
        if replica is None:  # its episode began again meanwhile
            return
        if replica.is_up:
            replica.add([request])
        else:
            self.add([request]) if self.living else replica.waiting.append(request)

    def _take_over(self, replica: SimulatedReplica) -> None:
        busiest = max(self.replicas, key=lambda other: len(other.waiting) if other.is_up else 0)
        if busiest.waiting and busiest.is_up:
            replica.add(busiest.give_half_of_what_waits())
